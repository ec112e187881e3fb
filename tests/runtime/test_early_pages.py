"""Memory of the blocks that come next is there before they are written."""

from __future__ import annotations

import mmap
import resource

import pytest
import torch

from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.runtime import early_pages
from headrace.runtime.early_pages import AHEAD_BYTES, PIECE_BYTES, EarlyPages
from headrace.runtime.kv_cache import KVCache, KVCacheLayout

BLOCK_BYTES = PIECE_BYTES // 2
AHEAD = AHEAD_BYTES // BLOCK_BYTES


class Taken:
    """Which blocks were asked for, in order."""

    def __init__(self, num_blocks: int) -> None:
        blocks = torch.empty(num_blocks, BLOCK_BYTES, dtype=torch.uint8)
        self.numbers: list[int] = []
        self.calls = 0
        self._address = blocks.data_ptr()
        self.pages = EarlyPages(blocks, self._populate)

    def _populate(self, address: int, num_bytes: int) -> bool:
        assert num_bytes <= PIECE_BYTES
        first, rest = divmod(address - self._address, BLOCK_BYTES)
        assert not rest and not num_bytes % BLOCK_BYTES
        self.numbers += range(first, first + num_bytes // BLOCK_BYTES)
        self.calls += 1
        return True

    def all_of(self, lowest: int, highest: int) -> list[int]:
        """What is asked for until there is nothing left to do."""
        self.numbers = []
        while self.pages.take(lowest, highest):
            pass
        assert len(set(self.numbers)) == len(self.numbers)
        return sorted(self.numbers)


def test_so_much_at_each_end_and_no_more() -> None:
    taken = Taken(4 * AHEAD)
    assert taken.all_of(0, 4 * AHEAD - 1) == [*range(AHEAD), *range(3 * AHEAD, 4 * AHEAD)]
    assert taken.calls == 2 * AHEAD * BLOCK_BYTES // PIECE_BYTES
    assert taken.all_of(0, 4 * AHEAD - 1) == []


def test_the_ends_are_followed_and_what_was_had_is_not_asked_for_again() -> None:
    taken = Taken(6 * AHEAD)
    taken.all_of(0, 6 * AHEAD - 1)
    assert taken.all_of(10, 6 * AHEAD - 7) == [*range(AHEAD, AHEAD + 10), *range(5 * AHEAD - 6, 5 * AHEAD)]
    assert taken.all_of(0, 6 * AHEAD - 1) == []  # blocks that were freed have their pages
    beyond = taken.all_of(2 * AHEAD, 6 * AHEAD - 7)  # the burst took more than that: its own are touched
    assert beyond == [*range(2 * AHEAD, 3 * AHEAD)]


@pytest.mark.parametrize("num_blocks", [1, 7, AHEAD + 3, 2 * AHEAD - 1])
def test_the_ends_meet(num_blocks: int) -> None:
    taken = Taken(num_blocks)
    assert taken.all_of(0, num_blocks - 1) == [*range(num_blocks)]
    assert taken.all_of(num_blocks - 1, num_blocks - 1) == taken.all_of(num_blocks, -1) == []


def test_a_block_larger_than_a_piece() -> None:
    asked: list[int] = []
    pages = EarlyPages(
        torch.empty(3, 2 * PIECE_BYTES, dtype=torch.uint8), lambda _, size: bool(asked.append(size)) or True
    )
    while pages.take(0, 2):
        pass
    assert asked == [2 * PIECE_BYTES] * 3


def test_a_system_that_cannot_is_not_asked_for_ever() -> None:
    pages = EarlyPages(torch.empty(8, BLOCK_BYTES, dtype=torch.uint8), lambda *_: False)
    assert not pages.take(0, 7)


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_writing_blocks_of_a_kv_cache_takes_no_page_faults_then() -> None:
    block_bytes = 16 * 2 * 4 * 64 * 4
    specs = [KVCacheSpec("full", (0,), block_bytes)]
    layout = KVCacheLayout(1, 4, 16, 64, torch.float32)
    cache = KVCache(specs, layout, (48 << 20) // block_bytes)
    cache.blocks[3] = 7
    pages = cache.early_pages
    assert pages is not None
    last = cache.num_blocks - 1
    if not pages.take(0, last):
        pytest.skip("this system gives no memory early")
    while pages.take(0, last):
        pass
    assert (cache.blocks[3] == 7).all(), "contents stay"
    before = minor_faults()
    cache.blocks.fill_(1)
    assert minor_faults() - before < cache.blocks.nbytes // mmap.PAGESIZE // 20


def test_elsewhere_there_is_no_such_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_pages.sys, "platform", "darwin")
    assert not EarlyPages(torch.empty(8, BLOCK_BYTES, dtype=torch.uint8)).take(0, 7)
