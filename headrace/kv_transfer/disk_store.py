"""DiskStore: a tier of files, one a block, that survives crashes and restarts.

A file is written under a temporary name and renamed when it is whole and on disk, so that a process or machine that
dies leaves nothing half written under a block's name. Each begins with a header::

    magic [8]  fingerprint [16]  key [16]  payload bytes uint64  crc32 of the payload uint32

and lies in a folder named for the fingerprint, which tells model, weights, types and layout apart: other models' files
are never looked at. A file that does not fit its header or its checksum is removed and its block computed again. Full
or read-only disks cost their blocks and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
import zlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.errors import ConfigError
from headrace.kv_transfer.transfer import BlockTransfer

logger = logging.getLogger(__name__)

MAGIC = b"HRKV\x00\x01\r\n"
_HEADER = struct.Struct("<8s16s16sQI")
MAX_WAITING_WRITES = 64
"""Blocks waiting to be written; more are left out, so that a slow disk never holds up the engine."""

RETRY_S = 30.0
"""After a failed write none is tried for so long."""


class DiskStore:
    """Blocks by key. ``write`` and ``clear`` return at once; one thread writes.

    Args:
        folder: made if need be; shared by all models.
        fingerprint: 16 bytes, of all that the meaning of a block's bytes depends on.
        block_bytes: bytes of a block.
        max_bytes: of all files of this fingerprint; the least recently used leave.

    Raises: ConfigError when ``max_bytes`` does not hold one block.
    """

    def __init__(self, folder: Path, fingerprint: bytes, block_bytes: int, max_bytes: int) -> None:
        self._file_bytes = _HEADER.size + block_bytes
        self._max_files = max_bytes // self._file_bytes
        if not self._max_files:
            raise ConfigError(
                f"disk_cache_bytes is {max_bytes}, less than one block's file of {self._file_bytes} bytes; raise it"
            )
        self._folder = folder / fingerprint.hex()
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._files: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._num_waiting = 0
        self._epoch = 0  # rises with each clearing: what waits to be written is not
        self._quiet_until = 0.0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-disk")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._scan()
        except OSError as error:
            self._complain("cannot be opened", error)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, key: object) -> bool:
        return key in self._files

    def read(self, key: bytes, out: memoryview) -> bool:
        """Fill ``out`` [block_bytes] with a block; False, and the file is gone, if it is not what it should be."""
        path = self._path(key)
        try:
            with path.open("rb") as file:
                header = file.read(_HEADER.size)
                is_whole = file.readinto(out) == self._block_bytes and not file.read(1)
        except OSError as error:
            self._complain(f"cannot be read ({path.name})", error)
            self._forget(key)
            return False
        expected = (MAGIC, self._fingerprint, key, self._block_bytes)
        is_good = is_whole and len(header) == _HEADER.size and _HEADER.unpack(header)[:4] == expected
        if not is_good or _HEADER.unpack(header)[4] != zlib.crc32(out):
            logger.warning("cached block %s is damaged; it is removed and computed again", path)
            self._forget(key)
            return False
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
        with contextlib.suppress(OSError):
            os.utime(path)  # the order of use survives a restart
        return True

    def write(self, key: bytes, payload: memoryview) -> BlockTransfer | None:
        """Begin to write a block, whose bytes must stay until it is done; None if it is not written."""
        if (
            key in self._files
            or self._num_waiting >= MAX_WAITING_WRITES
            or time.monotonic() < self._quiet_until
        ):
            return None
        transfer = BlockTransfer()
        self._num_waiting += 1
        self._thread.submit(self._write, key, payload, transfer, self._epoch)
        return transfer

    def clear(self) -> None:
        """Remove all files of this fingerprint."""
        with self._lock:
            keys = list(self._files)
            self._files.clear()
            self._epoch += 1
        self._thread.submit(self._unlink_all, keys)

    def shutdown(self) -> None:
        """Write what waits, then stop."""
        self._thread.shutdown(wait=True)

    def _scan(self) -> None:
        """Find what an earlier process left; what a crash left half written is removed."""
        found = []
        for entry in os.scandir(self._folder):
            key = _key_of(entry.name)
            with contextlib.suppress(OSError):
                status = entry.stat()
                if key is not None and status.st_size == self._file_bytes:
                    found.append((status.st_mtime_ns, key))
                else:
                    os.unlink(entry.path)
        self._files = OrderedDict((key, None) for _, key in sorted(found))

    def _write(self, key: bytes, payload: memoryview, transfer: BlockTransfer, epoch: int) -> None:
        start = time.perf_counter()
        num_done = 0
        if epoch != self._epoch:
            self._num_waiting -= 1
            transfer.finish(0, 0.0)
            return
        temporary = self._folder / f"{key.hex()}.{os.getpid()}.tmp"
        try:
            with temporary.open("wb") as file:
                file.write(
                    _HEADER.pack(MAGIC, self._fingerprint, key, self._block_bytes, zlib.crc32(payload))
                )
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._path(key))
            with self._lock:
                self._files[key] = None
            num_done = 1
            self._make_room()
        except OSError as error:
            self._complain("cannot be written", error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        finally:
            self._num_waiting -= 1
            transfer.finish(num_done, 1e3 * (time.perf_counter() - start))

    def _make_room(self) -> None:
        while len(self._files) > self._max_files:
            with self._lock:
                key, _ = self._files.popitem(last=False)
            self._path(key).unlink(missing_ok=True)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._files.pop(key, None)
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _unlink_all(self, keys: list[bytes]) -> None:
        for key in keys:
            with contextlib.suppress(OSError):
                self._path(key).unlink(missing_ok=True)

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}.kv"

    def _complain(self, what: str, error: OSError) -> None:
        """Say it once in a while, and leave the disk alone meanwhile."""
        now = time.monotonic()
        if now >= self._quiet_until:
            logger.warning("disk cache %s %s: %s; blocks are computed instead", self._folder, what, error)
        self._quiet_until = now + RETRY_S


def _key_of(name: str) -> bytes | None:
    """The key in a file's name, or None if it is not a block's file."""
    stem, dot, suffix = name.partition(".")
    if dot + suffix != ".kv" or len(stem) != 32:
        return None
    try:
        return bytes.fromhex(stem)
    except ValueError:
        return None
