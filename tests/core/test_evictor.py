"""What leaves first when leaves and idle sliding blocks compete, and what a tier is offered."""

from __future__ import annotations

from array import array

from headrace.core.block_pool import BlockPool
from headrace.core.evictor import MAX_PASSED_OVER
from headrace.core.interfaces import CacheTier
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.kv_integrity import check_tree
from headrace.core.radix_cache import RadixCache
from tests.core.kv_simulation import full, sliding

BLOCK = 2


class Offers:
    """A tier that writes down what it is offered and takes what it is told to."""

    def __init__(self, takes: bool) -> None:
        self.takes = takes
        self.offers: list[tuple[list[int], list[int]]] = []

    def on_evict(self, namespace: str, prefix: bytes, block_ids: list[int]) -> bool:
        token_ids = list(memoryview(prefix).cast("I"))
        self.offers.append((token_ids, block_ids))
        return self.takes


def make(num_blocks: int, specs: list[KVCacheSpec], tier: Offers | None = None) -> RadixCache:
    typed: CacheTier | None = tier  # type: ignore[assignment]
    return RadixCache(BlockPool(num_blocks), specs, BLOCK, typed)


def put(cache: RadixCache, tokens: list[int]) -> list[list[int]]:
    """Cache whole blocks of ``tokens``, held by nobody; returns their ids by group."""
    table = [cache.pool.allocate(len(tokens) // BLOCK) for _ in range(cache.num_groups)]
    root = cache.tree.root("")
    cache.lock(root)
    node = cache.insert(root, array("I", tokens).tobytes(), table)
    cache.unlock(node)
    for ids in table:
        cache.pool.decref(ids)
        cache.release(ids)
    return table


def test_the_older_of_idle_block_and_leaf_goes_first() -> None:
    cache = make(20, [full(), sliding(4)])
    first, second = put(cache, [1, 2, 3, 4]), put(cache, [5, 6, 7, 8])
    assert list(cache.evictor.idle) == [*reversed(first[1]), *reversed(second[1])]
    cache.evict(13)  # at equal times the leaf's tail, in both groups at once
    assert set(cache.evictor.idle) == {first[1][0], *second[1]}
    cache.evictor.idle[first[1][0]] = 0  # long unused
    cache.evict(15)
    assert set(cache.evictor.idle) == set(second[1]) and cache.num_evictable_blocks == 1 + 4
    check_tree(cache)


def test_evictions_are_no_more_than_asked_for() -> None:
    cache = make(40, [full(), full()])
    put(cache, list(range(20)))
    put(cache, list(range(100, 120)))
    for wanted in range(1, 41):
        cache.evict(wanted)
        assert cache.pool.num_free <= wanted + 1, "a position is two blocks"
        assert cache.pool.num_free >= min(wanted, 40)
        check_tree(cache)
    assert cache.evictor.num_evicted_blocks == 40


def test_the_search_past_fenced_leaves_is_bounded_and_the_oldest_are_fenced_then() -> None:
    cache = make(100, [full()])
    blocks = [put(cache, [n, n])[0][0] for n in range(MAX_PASSED_OVER + 5)]
    cache.pool.touch(blocks[:MAX_PASSED_OVER], 9)
    cache.evict(cache.pool.num_free + 1)
    assert cache.pool.num_fenced == 1 and cache.pool.fenced_blocks() == blocks[:1]
    cache.pool.advance(9)
    cache.evict(cache.pool.num_free + 2)
    assert cache.num_evictable_blocks == MAX_PASSED_OVER + 5 - 3
    check_tree(cache)


def test_a_tier_is_offered_the_prefix_and_the_blocks_that_only_the_tree_holds() -> None:
    tier = Offers(takes=False)
    cache = make(20, [full(), sliding(4)], tier)
    full_ids, sliding_ids = put(cache, [1, 2, 3, 4])
    cache.pool.incref([full_ids[1]])  # a fork that has not committed it yet
    cache.evict(18)
    assert tier.offers == [([1, 2, 3, 4], [-1, sliding_ids[1]]), ([1, 2], [full_ids[0], sliding_ids[0]])]
    assert cache.pool.num_free == 19 and not cache.tree.roots


def test_idle_blocks_are_offered_alone() -> None:
    tier = Offers(takes=True)
    cache = make(20, [sliding(4)], tier)
    (ids,) = put(cache, [1, 2, 3, 4, 5, 6])
    cache.evict(18)
    assert tier.offers == [([1, 2, 3, 4, 5, 6], [ids[2]])]
    assert cache.evictor.in_transfer == {ids[2]} and cache.pool.num_free == 17
    cache.release_transfer([-1, ids[2]])
    assert cache.pool.num_free == 18 and not cache.evictor.in_transfer
    check_tree(cache)
