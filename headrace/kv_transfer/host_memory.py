"""HostMemory: a tier of pinned host memory, and the copies between it and the device's blocks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from headrace.errors import ConfigError
from headrace.kv_transfer.transfer import BlockTransfer
from headrace.platforms.base import CopyStream

logger = logging.getLogger(__name__)


class Item(Protocol):
    """A block to load: into which device block, by way of which slot, which a file fills first if ``is_on_disk``."""

    key: bytes
    slot: int
    block: int
    is_on_disk: bool


class Files(Protocol):
    """Where blocks on disk are read from."""

    def read(self, key: bytes, out: memoryview) -> bool:
        """Fill ``out`` with a block; False if the file cannot be used."""


class Compression(Protocol):
    """Another form of blocks, in host memory and below."""

    @property
    def num_bytes(self) -> int:
        """Of a block in that form."""

    def compress(self, block: torch.Tensor) -> torch.Tensor:
        """block [bytes_per_block] uint8 -> [num_bytes] uint8 on the same device."""

    def restore(self, compressed: torch.Tensor) -> torch.Tensor:
        """The other way."""


class HostMemory:
    """[num_slots, slot_bytes] of host memory. One thread does all copies, in order.

    Device blocks are only read when the steps that wrote them have completed, and only written while nobody else may
    use them; so nothing here waits for the computing queue.

    Args:
        blocks: [num_blocks, bytes_per_block] uint8, the device's.
        num_bytes: host memory to take; whole blocks of it are used.
        stream: the device's queue for copies; None: copies are plain.
        compression: the form of blocks in slots; None: as on the device.

    Attributes:
        num_slots: blocks that fit.
        slot_bytes: bytes of one.

    Raises: ConfigError when it does not hold a block, or cannot be had.
    """

    def __init__(
        self,
        blocks: torch.Tensor,
        num_bytes: int,
        stream: CopyStream | None,
        compression: Compression | None = None,
    ) -> None:
        self.slot_bytes = blocks.shape[1] if compression is None else compression.num_bytes
        self.num_slots = num_bytes // self.slot_bytes
        if not self.num_slots:
            raise ConfigError(
                f"host_cache_bytes is {num_bytes}, less than one KV block of {self.slot_bytes} bytes; raise it or "
                "leave it out"
            )
        self._blocks = blocks
        self._compression = compression
        self._stream = stream
        try:
            self._memory = torch.empty(
                (self.num_slots, self.slot_bytes),
                dtype=torch.uint8,
                pin_memory=stream is not None,
                device="cpu",
            )
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"host memory for the cache tier cannot be had ({num_bytes} bytes); lower host_cache_bytes"
            ) from error
        self._bytes: memoryview = memoryview(self._memory.numpy().reshape(-1))  # type: ignore[arg-type]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-tier")

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot."""
        return self._bytes[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def store(self, block: int, slot: int) -> BlockTransfer:
        """Begin to copy a device block into a slot. On a device without a copy queue it is done on return."""
        transfer = BlockTransfer()
        if self._stream is None:
            self._store(block, slot, transfer)
        else:
            self._thread.submit(self._store, block, slot, transfer)
        return transfer

    def load(self, items: Sequence[Item], files: Files | None) -> BlockTransfer:
        """Begin to copy slots into device blocks, those on disk read first; it ends at the first that fails."""
        transfer = BlockTransfer()
        self._thread.submit(self._load, list(items), files, transfer)
        return transfer

    def shutdown(self) -> None:
        """Wait for the copies under way."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _store(self, block: int, slot: int, transfer: BlockTransfer) -> None:
        def copy() -> None:
            source = self._blocks[block]
            source = source if self._compression is None else self._compression.compress(source)
            self._memory[slot].copy_(source, non_blocking=True)

        self._move(transfer, copy, 1)

    def _load(self, items: list[Item], files: Files | None, transfer: BlockTransfer) -> None:
        start = time.perf_counter()
        num_ready = 0
        for item in items:
            if item.is_on_disk and not (files is not None and files.read(item.key, self.view(item.slot))):
                break
            num_ready += 1

        def copy() -> None:
            for item in items[:num_ready]:
                source = self._memory[item.slot]
                if self._compression is not None:
                    source = self._compression.restore(source.to(self._blocks.device, non_blocking=True))
                self._blocks[item.block].copy_(source, non_blocking=True)

        self._move(transfer, copy, num_ready, start)

    def _move(
        self, transfer: BlockTransfer, copy: Callable[[], object], num_blocks: int, start: float | None = None
    ) -> None:
        """Run ``copy`` in the copy queue and wait for it; a failure moves nothing."""
        start = time.perf_counter() if start is None else start
        num_done = 0
        try:
            with torch.inference_mode(), self._stream.use() if self._stream else contextlib.nullcontext():
                copy()
            if self._stream is not None:
                self._stream.wait()
            num_done = num_blocks
        except RuntimeError:
            logger.exception("a copy between device and host cache failed; the blocks are computed again")
        transfer.finish(num_done, 1e3 * (time.perf_counter() - start))
