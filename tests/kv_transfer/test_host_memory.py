"""Copies between device blocks and host slots."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import pytest
import torch

from headrace.errors import ConfigError
from headrace.kv_transfer.host_memory import HostMemory
from headrace.kv_transfer.transfer import BlockTransfer


@dataclass
class Item:
    key: bytes
    slot: int
    block: int
    is_on_disk: bool


class Files:
    """Holds some blocks."""

    def __init__(self, blocks: dict[bytes, bytes]) -> None:
        self.blocks = blocks

    def read(self, key: bytes, out: memoryview) -> bool:
        if key not in self.blocks:
            return False
        out[:] = self.blocks[key]
        return True


class LateStream:
    """A queue that is there; the CPU's copies are done at once."""

    def use(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def wait(self) -> None:
        time.sleep(0.01)


def wait(transfer: BlockTransfer) -> BlockTransfer:
    end = time.monotonic() + 10
    while not transfer.is_done and time.monotonic() < end:
        time.sleep(1e-3)
    assert transfer.is_done
    return transfer


def make_blocks() -> torch.Tensor:
    return torch.arange(10 * 64, dtype=torch.int64).to(torch.uint8).view(10, 64) + 1


def test_blocks_go_out_and_come_back() -> None:
    blocks = make_blocks()
    before = blocks.clone()
    host = HostMemory(blocks, 4 * 64 + 30, None)
    assert host.num_slots == 4
    for block, slot in ((7, 0), (2, 3)):
        assert host.store(block, slot).is_done, "without a copy queue it is done on return"
    assert bytes(host.view(3)) == bytes(before[2].tolist())
    blocks.zero_()
    moved = wait(host.load([Item(b"a", 0, 5, False), Item(b"b", 3, 6, False)], None))
    assert moved.num_done == 2
    assert torch.equal(blocks[5], before[7]) and torch.equal(blocks[6], before[2])
    assert not blocks[[0, 1, 2, 3, 4, 7, 8, 9]].any()
    host.shutdown()


def test_files_are_read_first_and_the_first_failure_ends_the_load() -> None:
    blocks = make_blocks()
    host = HostMemory(blocks, 640, None)
    files = Files({b"a": bytes([9] * 64), b"c": bytes([8] * 64)})
    items = [Item(b"a", 0, 1, True), Item(b"b", 1, 2, True), Item(b"c", 2, 3, True)]
    before = blocks.clone()
    assert wait(host.load(items, files)).num_done == 1
    assert blocks[1].tolist() == [9] * 64 and torch.equal(blocks[2:], before[2:])
    assert wait(host.load(items[1:], files)).num_done == 0
    host.shutdown()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a device")
def test_a_copy_queue_moves_beside_the_caller() -> None:
    host = HostMemory(make_blocks(), 640, LateStream())
    transfer = host.store(1, 1)
    assert wait(transfer).num_done == 1 and transfer.elapsed_ms >= 10
    host.shutdown()


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="host_cache_bytes"):
        HostMemory(make_blocks(), 63, None)
