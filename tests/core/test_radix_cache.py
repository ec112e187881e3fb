"""Match, hold, insert, evict, reset: the cache against exact expectations."""

from __future__ import annotations

import random
from array import array

import pytest

from benchmarks.prefix.lru_simulator import BlockLRU
from headrace.core.block_pool import BlockPool
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.kv_integrity import check_tree
from headrace.core.prefix_match import PrefixMatch
from headrace.core.radix_cache import RadixCache
from headrace.core.radix_tree import RadixNode
from tests.core.kv_simulation import full, sliding

BLOCK = 4


def pack(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


class Fixture:
    """A cache, and requests reduced to what they hold."""

    def __init__(self, num_blocks: int = 50, specs: list[KVCacheSpec] | None = None) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = RadixCache(self.pool, specs or [full()], BLOCK)

    def match(self, tokens: list[int], min_copy_tokens: int | None = 2, namespace: str = "") -> PrefixMatch:
        return self.cache.match(namespace, pack(tokens), min_copy_tokens)

    def hold(self, tokens: list[int], namespace: str = "") -> tuple[RadixNode, list[list[int]]]:
        """Insert whole blocks of ``tokens`` with blocks of one's own, and keep holding them."""
        num_blocks = len(tokens) // BLOCK
        table = [self.pool.allocate(num_blocks) for _ in range(self.cache.num_groups)]
        root = self.cache.tree.root(namespace)
        self.cache.lock(root)
        node = self.cache.insert(root, pack(tokens[: num_blocks * BLOCK]), table)
        return node, table

    def leave(self, node: RadixNode, table: list[list[int]]) -> None:
        self.cache.unlock(node)
        for ids in table:
            self.pool.decref(ids)
            self.cache.release(ids)

    def put(self, tokens: list[int], namespace: str = "") -> list[list[int]]:
        """Insert and let go; returns the blocks used."""
        node, table = self.hold(tokens, namespace)
        self.leave(node, table)
        return table

    def check(self) -> None:
        check_tree(self.cache)
        self.pool.check_integrity()


def text(first: int, length: int) -> list[int]:
    return list(range(first, first + length))


def test_whole_blocks_match_and_the_rest_is_not_there() -> None:
    fixture = Fixture()
    (blocks,) = fixture.put(text(0, 22))
    match = fixture.match(text(0, 22))
    assert (match.num_tokens, match.num_full_blocks, match.block_ids) == (20, 5, [blocks[:5]])
    assert match.partial is None and match.node is not None
    assert fixture.match(text(0, 3)).num_tokens == 3, "less than a block is copied"
    assert fixture.match(text(100, 20)).num_tokens == 0
    assert fixture.match(text(0, 20), namespace="other").num_tokens == 0


def test_a_match_may_end_inside_any_block() -> None:
    fixture = Fixture()
    (blocks,) = fixture.put(text(0, 24))
    query = [*text(0, 10), 900, 901]
    match = fixture.match(query)
    assert (match.num_tokens, match.block_ids, match.partial) == (10, [blocks[:2]], ([blocks[2]], 2))
    assert fixture.match(query, min_copy_tokens=3).num_tokens == 8
    assert fixture.match(query, min_copy_tokens=None).num_tokens == 8
    short = fixture.match(text(0, 15))
    assert (short.num_tokens, short.partial) == (15, ([blocks[3]], 3)), "the request's end, too"
    fixture.check()


def test_the_longest_partial_ending_among_many_children_wins() -> None:
    fixture = Fixture()
    fixture.put([*text(0, 8), 1, 2, 3, 4])
    (best,) = fixture.put([*text(0, 8), 1, 2, 7, 7])
    fixture.put([*text(0, 8), 1, 9, 9, 9])
    match = fixture.match([*text(0, 8), 1, 2, 7, 8])
    assert match.partial == ([best[2]], 3)


def test_locked_paths_stay_and_the_least_recently_used_leaf_goes_tail_first() -> None:
    fixture = Fixture(num_blocks=12)
    (old,) = fixture.put(text(0, 16))
    (young,) = fixture.put(text(100, 16))
    node, table = fixture.hold(text(200, 8))
    assert fixture.pool.num_free == 2 and fixture.cache.num_evictable_blocks == 8
    fixture.cache.evict(3)
    assert fixture.pool.num_free == 3 and fixture.match(text(0, 16), None).block_ids == [old[:3]]
    fixture.cache.evict(5)  # the first text was used just now, so the other one goes
    assert fixture.match(text(100, 16), None).block_ids == [young[:2]]
    fixture.cache.evict(12)
    assert fixture.pool.num_free == 10 and fixture.cache.num_evictable_blocks == 0
    assert fixture.match(text(200, 8), None).num_tokens == 8, "it is locked"
    fixture.leave(node, table)
    fixture.cache.evict(12)
    assert fixture.pool.num_free == 12 and not fixture.cache.tree.roots
    fixture.check()


def test_a_branch_point_outlives_its_branches() -> None:
    fixture = Fixture()
    fixture.put(text(0, 12) + text(500, 8))
    fixture.put(text(0, 12) + text(600, 8))
    fixture.put(text(700, 4))
    fixture.cache.evict(fixture.pool.num_free + 4)
    assert fixture.match(text(0, 12) + text(500, 8), None).num_tokens == 12
    assert fixture.match(text(0, 12) + text(600, 8), None).num_tokens == 12
    assert fixture.match(text(700, 4), None).num_tokens == 4
    fixture.check()


def test_blocks_of_steps_in_flight_are_passed_over_and_fenced_at_last() -> None:
    fixture = Fixture(num_blocks=8)
    (old,) = fixture.put(text(0, 16))
    fixture.put(text(100, 16))
    fixture.pool.touch(old, 5)
    fixture.cache.evict(2)
    assert fixture.pool.num_free == 2 and fixture.pool.num_fenced == 0
    assert fixture.match(text(0, 16), None).num_tokens == 16, "older, but a step reads it"
    fixture.cache.evict(5)
    assert (fixture.pool.num_free, fixture.pool.num_fenced) == (4, 1)
    fixture.cache.evict(5)
    assert fixture.pool.num_fenced == 1, "what is fenced already counts"
    fixture.pool.advance(5)
    assert fixture.pool.num_free == 5
    fixture.check()


def test_pinned_blocks_are_never_evicted() -> None:
    fixture = Fixture(num_blocks=8)
    (blocks,) = fixture.put(text(0, 32))
    fixture.cache.pin([blocks[5]])
    fixture.cache.evict(8)
    assert fixture.pool.num_free == 2 and fixture.match(text(0, 32), None).num_full_blocks == 6
    fixture.cache.unpin([blocks[5]])
    fixture.cache.evict(8)
    assert fixture.pool.num_free == 8


def test_duplicates_are_dropped_where_nobody_else_uses_the_cached_block() -> None:
    fixture = Fixture(num_blocks=16)
    (cached,) = fixture.put(text(0, 16))
    node, (own,) = fixture.hold(text(0, 16))
    assert set(own).isdisjoint(cached)
    assert fixture.match(text(0, 16), None).block_ids == [own], "the cached ones went"
    assert fixture.pool.num_free == 12
    other, (second,) = fixture.hold(text(0, 20))
    assert fixture.match(text(0, 20), None).block_ids == [own + second[4:]], (
        "in use: the newcomer keeps its own"
    )
    fixture.leave(other, [second])
    fixture.leave(node, [own])
    assert fixture.pool.num_free == 11 and fixture.cache.num_evictable_blocks == 5
    fixture.check()


def test_reset_drops_all_but_what_is_held() -> None:
    fixture = Fixture()
    fixture.put(text(0, 16))
    node, table = fixture.hold(text(0, 8) + text(70, 8))
    assert not fixture.cache.reset()
    assert fixture.match(text(0, 16), None).num_tokens == 8
    fixture.leave(node, table)
    assert fixture.cache.reset() and not fixture.cache.tree.roots
    assert fixture.pool.num_free == 50
    fixture.check()


def test_a_sliding_group_needs_the_window_only() -> None:
    fixture = Fixture(specs=[full(), sliding(6)])
    full_ids, sliding_ids = fixture.put(text(0, 24))
    match = fixture.match(text(0, 24), None)
    assert match.block_ids == [full_ids, [-1] * 4 + sliding_ids[4:]]
    fixture.cache.evictor.drop(sliding_ids[4])
    shorter = fixture.match(text(0, 24), None)
    assert shorter.num_full_blocks == 4 and shorter.block_ids[1] == [-1, -1, *sliding_ids[2:4]]
    assert fixture.match([*text(0, 22), 9], 2).num_tokens == 16, "a partial ending needs its window as well"
    fixture.check()


def test_idle_sliding_blocks_leave_in_order_of_use_while_the_path_stays() -> None:
    fixture = Fixture(num_blocks=24, specs=[full(), sliding(6)])
    node, table = fixture.hold(text(0, 24))
    for block in table[1][:4]:  # what falls behind the window while the request runs
        fixture.pool.decref([block])
        fixture.cache.release([block])
    assert fixture.cache.num_evictable_blocks == 4 and fixture.pool.num_free == 12
    fixture.cache.evict(14)
    assert fixture.pool.num_free == 14
    assert fixture.match(text(0, 16), None).block_ids[1] == [-1, -1, *table[1][2:4]]
    assert fixture.match(text(0, 12), None).num_tokens == 0, "its window is gone"
    fixture.leave(node, [table[0], [-1] * 4 + table[1][4:]])
    fixture.cache.evict(24)
    assert fixture.pool.num_free == 24 and not fixture.cache.tree.homes
    fixture.check()


def test_a_path_without_any_block_left_is_forgotten() -> None:
    fixture = Fixture(num_blocks=12, specs=[sliding(6)])
    fixture.put(text(0, 24))
    fixture.put(text(0, 8) + text(300, 8))
    fixture.cache.evict(12)
    assert fixture.pool.num_free == 12 and not fixture.cache.tree.roots
    fixture.check()


def test_a_request_heals_sliding_blocks_that_had_gone() -> None:
    fixture = Fixture(num_blocks=40, specs=[full(), sliding(6)])
    fixture.put(text(0, 24))
    for block in list(fixture.cache.evictor.idle):
        fixture.cache.evictor.drop(block)
    assert fixture.match(text(0, 24), None).num_tokens == 0
    own = fixture.put(text(0, 24))
    assert fixture.match(text(0, 24), None).block_ids == [own[0], [-1] * 4 + own[1][4:]]
    assert fixture.pool.num_free == 40 - 12
    fixture.check()


@pytest.mark.parametrize("seed", range(6))
def test_hits_equal_those_of_an_exact_lru(seed: int) -> None:
    """Block by block, over random prompts that share random prefixes, in a pool much smaller than their tree."""
    rng = random.Random(seed)
    num_blocks = rng.choice([15, 25, 40])
    fixture, simulator = Fixture(num_blocks), BlockLRU(num_blocks, BLOCK)
    documents = [[rng.randrange(9) for _ in range(50)] for _ in range(4)]
    for _ in range(400):
        prompt = rng.choice(documents)[: rng.randint(1, 48)] + [
            rng.randrange(9) for _ in range(rng.randint(1, 8))
        ]
        match = fixture.match(prompt[:-1], None)
        assert match.num_tokens == simulator.serve(prompt, [0])
        # what KVCacheManager does with one request, without its bookkeeping
        cache, pool = fixture.cache, fixture.pool
        node = match.node or cache.tree.root("")
        cache.lock(node)
        pool.incref(match.block_ids[0])
        needed = -(-len(prompt) // BLOCK) - match.num_full_blocks
        cache.evict(needed)
        table = match.block_ids[0] + pool.allocate(needed)
        whole = len(prompt) // BLOCK
        start = match.num_full_blocks
        if whole > start:
            node = cache.insert(node, pack(prompt[start * BLOCK : whole * BLOCK]), [table[start:whole]])
        fixture.leave(node, [table])
        fixture.check()
