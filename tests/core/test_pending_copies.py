"""Copies own their source until their step has it."""

from __future__ import annotations

import pytest

from headrace.core.block_pool import BlockPool
from headrace.core.output import BlockCopy
from headrace.core.pending_copies import PendingCopies
from headrace.core.radix_cache import RadixCache
from tests.core.kv_simulation import full


def make() -> tuple[BlockPool, RadixCache, PendingCopies]:
    pool = BlockPool(10)
    cache = RadixCache(pool, [full()], 4)
    return pool, cache, PendingCopies(cache)


def test_a_source_given_up_before_the_step_is_fenced_by_it() -> None:
    pool, cache, copies = make()
    src, dst = pool.allocate(2)
    cache.pin([src])
    copies.add(src, dst, 3, step_id=7)
    pool.decref([src])
    assert pool.num_free == 8, "pinned"
    assert copies.take() == [BlockCopy(src, dst, 3)] and copies.take() == []
    assert pool.num_fenced == 1 and pool.last_read_step[dst] == 7
    pool.advance(7)
    assert pool.num_free == 9


def test_a_cancelled_copy_leaves_no_trace() -> None:
    pool, cache, copies = make()
    src, first, second = pool.allocate(3)
    for dst in (first, second):
        cache.pin([src])
        copies.add(src, dst, 2, step_id=7)
    copies.cancel([first, -1])
    pool.decref([first])
    assert pool.num_free == 8 and pool.num_fenced == 0
    copies.cancel([second])
    pool.decref([src, second])
    assert pool.num_free == 10 and copies.take() == [] and not cache.evictor.pinned


def test_a_copy_of_what_is_being_copied_reads_the_first_source() -> None:
    pool, cache, copies = make()
    src, dst = pool.allocate(2)
    cache.pin([src])
    copies.add(src, dst, 3, step_id=7)
    assert copies.origin(dst, 2) == src and copies.origin(src, 4) == src
    with pytest.raises(AssertionError, match="has 3 tokens, not 4"):
        copies.origin(dst, 4)
