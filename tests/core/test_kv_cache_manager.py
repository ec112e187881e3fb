"""The scheduler's view: all or nothing, sharing, copies, forks, the fence."""

from __future__ import annotations

import pytest

from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import BlockCopy
from headrace.core.request import Request, RequestStatus
from tests.core.kv_simulation import full, make_request, sliding


def admit(kv: KVCacheManager, request: Request, num_tokens: int | None = None, step_id: int = 1) -> bool:
    match = kv.match(request, request.num_tokens - 1)
    return kv.admit(request, match, num_tokens or request.num_tokens, step_id)


def run(kv: KVCacheManager, request: Request, step_id: int = 1) -> None:
    """Compute and commit all known tokens in one step that has completed."""
    assert kv.grow(request, request.num_tokens)
    request.last_step_id = step_id
    request.num_computed_tokens = request.num_committed_tokens = request.num_tokens
    kv.take_block_copies()
    kv.commit(request)
    kv.advance(step_id)


def cache(kv: KVCacheManager, tokens: list[int], step_id: int = 1) -> list[list[int]]:
    """Leave these tokens in the prefix cache; returns the block table they had."""
    request = make_request(tokens, "cached")
    assert admit(kv, request)
    run(kv, request, step_id)
    table = [list(ids) for ids in request.block_table]
    kv.free(request)
    return table


def text(first: int, length: int) -> list[int]:
    return list(range(first, first + length))


def test_admission_shares_whole_blocks_and_copies_the_rest() -> None:
    kv = KVCacheManager([full()], 20, 4, min_copy_tokens=2)
    (old,) = cache(kv, text(0, 20))
    request = make_request([*text(0, 11), 900, 901, 902])
    assert admit(kv, request, 14, step_id=5)
    (table,) = request.block_table
    assert table[:2] == old[:2] and set(table[2:]).isdisjoint(old)
    assert request.num_computed_tokens == request.num_committed_tokens == request.num_cached_tokens == 11
    assert request.capacity_tokens == 16 and kv.take_new_blocks(request) is None
    assert kv.take_block_copies() == [BlockCopy(old[2], table[2], 3)]
    assert kv.take_block_copies() == []
    kv.check_integrity([request])


def test_every_group_shares_and_copies() -> None:
    kv = KVCacheManager([full(), sliding(6)], 40, 4, min_copy_tokens=2)
    first, second = cache(kv, text(0, 20))
    request = make_request([*text(0, 18), 900, 901])
    assert admit(kv, request, step_id=5)
    assert request.num_computed_tokens == 18
    assert request.block_table[0][:4] == first[:4]
    assert request.block_table[1][:4] == [-1, -1, -1, second[3]], "18 tokens in, only 13 .. 17 are read"
    copies = kv.take_block_copies()
    assert [copy.src for copy in copies] == [first[4], second[4]]
    assert [copy.dst for copy in copies] == [request.block_table[0][4], request.block_table[1][4]]
    kv.check_integrity([request])


def test_a_first_admission_counts_cached_tokens_and_a_resumption_does_not() -> None:
    kv = KVCacheManager([full()], 20, 4)
    request = make_request(text(0, 13))
    assert admit(kv, request) and request.num_cached_tokens == 0
    run(kv, request)
    kv.free(request)
    request.status = RequestStatus.PREEMPTED
    assert admit(kv, request) and request.num_computed_tokens == 12 and request.num_cached_tokens == 0


def test_admission_is_all_or_nothing() -> None:
    kv = KVCacheManager([full()], 10, 4)
    cache(kv, text(0, 16))
    other = make_request(text(500, 20), "other")
    assert admit(kv, other)
    request = make_request(text(0, 16) + text(700, 12))
    assert kv.num_usable_blocks == 5
    assert not admit(kv, request), "4 cached blocks, and 3 of the 1 free"
    assert request.block_table == [] and request.capacity_tokens == 0 and kv.num_usable_blocks == 5
    kv.check_integrity([other])
    assert kv.match(request, 16).num_tokens == 16, "what it wanted to share is still there"
    assert admit(kv, request, 20)


def test_reserved_blocks_stay_usable() -> None:
    kv = KVCacheManager([full()], 10, 4)
    cache(kv, text(0, 16))
    request = make_request(text(0, 16) + text(700, 8))
    match = kv.match(request, 23)
    assert not kv.admit(request, match, 24, 2, reserve_blocks=5)
    assert kv.admit(request, match, 24, 2, reserve_blocks=4)
    assert kv.num_usable_blocks == 4


def test_a_match_that_is_out_of_date_is_made_again() -> None:
    kv = KVCacheManager([full()], 8, 4)
    cache(kv, text(0, 24))
    request = make_request(text(0, 24) + text(50, 4))
    match = kv.match(request, 27)
    other = make_request(text(300, 20), "other")
    assert admit(kv, other), "evicts what was matched"
    assert kv.admit(request, match, 12, 2)
    assert request.num_computed_tokens == 12 == request.num_cached_tokens
    kv.check_integrity([request, other])


def test_a_match_whose_namespace_was_forgotten_meanwhile_is_made_again() -> None:
    kv = KVCacheManager([full()], 8, 4)
    other, request = make_request(text(0, 9), "other"), make_request(text(0, 9))
    assert admit(kv, other)
    match = kv.match(request, 8)
    kv.free(other)
    assert not kv.cache.tree.roots
    assert kv.admit(request, match, 9, 2)
    kv.check_integrity([request])


def test_the_only_source_may_be_evicted_rather_than_copied() -> None:
    """A request that needs all blocks gets them, though one of them would have saved it some tokens."""
    kv = KVCacheManager([full()], 6, 4, min_copy_tokens=2)
    cache(kv, text(0, 24))
    request = make_request([*text(0, 7), *text(800, 17)])
    assert admit(kv, request)
    assert request.num_computed_tokens == 4 and kv.take_block_copies() == []
    assert kv.num_usable_blocks == 0
    kv.check_integrity([request])


def test_prefixes_of_other_namespaces_are_not_shared() -> None:
    kv = KVCacheManager([full()], 20, 4)
    cache(kv, text(0, 16))
    assert kv.match(make_request(text(0, 16), namespace="tenant"), 15).num_tokens == 0


def test_nothing_is_shared_with_prefix_caching_off() -> None:
    kv = KVCacheManager([full()], 20, 4, enable_prefix_caching=False)
    cache(kv, text(0, 16))
    assert kv.match(make_request(text(0, 16)), 15).num_tokens == 0
    assert kv.pool.num_free == 20 and kv.num_evictable_blocks == 0


def test_matches_follow_tokens_that_were_added() -> None:
    kv = KVCacheManager([full()], 20, 4)
    cache(kv, text(0, 16))
    request = make_request(text(0, 5))
    assert kv.match(request, 4).num_tokens == 4
    request.token_ids += text(5, 8)
    assert kv.match(request, 12).num_tokens == 12


def test_growth_is_told_once_and_in_every_group() -> None:
    kv = KVCacheManager([full(0), full(1)], 20, 4)
    request = make_request(text(0, 4))
    assert admit(kv, request)
    assert kv.grow(request, 4) and kv.take_new_blocks(request) is None
    assert kv.grow(request, 10) and request.capacity_tokens == 12
    assert kv.take_new_blocks(request) == [request.block_table[0][1:], request.block_table[1][1:]]
    assert kv.take_new_blocks(request) is None


def test_growth_that_does_not_fit_changes_nothing() -> None:
    kv = KVCacheManager([full()], 4, 4)
    request = make_request(text(0, 8))
    assert admit(kv, request)
    assert not kv.grow(request, 17)
    assert request.capacity_tokens == 8 and kv.pool.num_free == 2
    assert kv.grow(request, 16)


def test_freed_blocks_wait_for_the_last_step_of_their_request() -> None:
    kv = KVCacheManager([full()], 4, 4, enable_prefix_caching=False)
    request = make_request(text(0, 16))
    assert admit(kv, request)
    request.last_step_id = 7
    kv.free(request)
    assert (kv.pool.num_free, kv.num_fenced_blocks) == (0, 4)
    other = make_request(text(0, 4), "other")
    assert not admit(kv, other)
    kv.advance(7)
    assert admit(kv, other)


def test_memory_that_only_steps_in_flight_hold_shows_as_fenced() -> None:
    """A failed growth means waiting, not preempting, if fenced blocks are there: also where the tree held them."""
    kv = KVCacheManager([full()], 8, 4)
    first, second = make_request(text(0, 16), "first"), make_request(text(100, 16), "second")
    assert admit(kv, first) and admit(kv, second)
    run(kv, first, step_id=1)
    first.last_step_id = 2  # it ran ahead of its end
    kv.free(first)
    assert kv.num_usable_blocks == 4 and kv.num_fenced_blocks == 0
    assert not kv.grow(second, 20) and kv.num_fenced_blocks == 1
    kv.advance(2)
    assert kv.grow(second, 20)
    kv.check_integrity([second])


def test_freeing_twice_and_freeing_a_waiting_request_do_nothing() -> None:
    kv = KVCacheManager([full()], 8, 4)
    request = make_request(text(0, 9))
    kv.match(request, 8)
    kv.free(request)
    assert admit(kv, request)
    kv.free(request)
    kv.free(request)
    assert kv.num_usable_blocks == 8


def test_an_admission_given_up_before_its_step_cancels_its_copy() -> None:
    kv = KVCacheManager([full()], 8, 4, min_copy_tokens=2)
    cache(kv, text(0, 16))
    request = make_request([*text(0, 7), *text(60, 5)])
    assert admit(kv, request, step_id=9) and request.num_computed_tokens == 7
    kv.free(request)
    assert kv.take_block_copies() == [] and kv.num_usable_blocks == 8 and kv.num_fenced_blocks == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("specs", [[full()], [full(), sliding(9)]])
def test_a_fork_shares_whole_blocks_and_copies_the_last(specs: list[KVCacheSpec], caching: bool) -> None:
    kv = KVCacheManager(specs, 40, 4, enable_prefix_caching=caching)
    parent = make_request(text(0, 15), "parent")
    assert admit(kv, parent)
    parent.num_computed_tokens, parent.last_step_id = 15, 1  # in flight
    child = make_request(text(0, 15), "child")
    assert kv.can_fork(parent, 14) and kv.fork(parent, child, 14, step_id=2)
    assert child.num_computed_tokens == 14 and child.num_committed_tokens == 0 and child.capacity_tokens == 16
    assert kv.take_block_copies() == [
        BlockCopy(mine[3], its[3], 2) for mine, its in zip(parent.block_table, child.block_table, strict=True)
    ]
    for mine, its in zip(parent.block_table, child.block_table, strict=True):
        assert mine[:3] == its[:3] and mine[3] != its[3]
    kv.check_integrity([parent, child])
    kv.free(parent)
    kv.advance(1)
    child.num_computed_tokens = child.num_committed_tokens = 15
    child.last_step_id = 2
    kv.commit(child)
    kv.check_integrity([child])
    kv.free(child)
    kv.advance(2)
    assert kv.num_usable_blocks == 40


def test_a_fork_at_a_block_boundary_needs_no_block() -> None:
    kv = KVCacheManager([full()], 4, 4)
    parent, child = make_request(text(0, 16), "parent"), make_request([*text(0, 12), 77], "child")
    assert admit(kv, parent)
    run(kv, parent)
    assert kv.fork(parent, child, 12, step_id=2) and kv.take_block_copies() == []
    assert child.block_table == [parent.block_table[0][:3]] and child.num_committed_tokens == 12
    assert kv.take_new_blocks(child) is None
    kv.check_integrity([parent, child])


def test_a_fork_without_a_block_for_its_copy_changes_nothing() -> None:
    kv = KVCacheManager([full()], 4, 4)
    parent, child = make_request(text(0, 16), "parent"), make_request(text(0, 16), "child")
    assert admit(kv, parent)
    run(kv, parent)
    assert not kv.fork(parent, child, 15, step_id=2)
    assert child.block_table == [] and kv.take_block_copies() == []
    kv.check_integrity([parent, child])


def test_a_fork_behind_released_blocks_is_refused_beforehand() -> None:
    kv = KVCacheManager([full(), sliding(6)], 40, 4)
    parent = make_request(text(0, 30), "parent")
    assert admit(kv, parent)
    run(kv, parent)
    assert kv.can_fork(parent, 30) and kv.can_fork(parent, 29) and not kv.can_fork(parent, 20)


def test_a_fork_of_what_is_still_to_be_copied_reads_the_first_source() -> None:
    kv = KVCacheManager([full()], 20, 4, min_copy_tokens=2)
    (old,) = cache(kv, text(0, 20))
    parent, child = make_request([*text(0, 11), 900], "parent"), make_request([*text(0, 11), 900], "child")
    assert admit(kv, parent, step_id=5)
    assert kv.fork(parent, child, 11, step_id=5)
    assert kv.take_block_copies() == [
        BlockCopy(old[2], parent.block_table[0][2], 3),
        BlockCopy(old[2], child.block_table[0][2], 3),
    ]
    kv.check_integrity([parent, child])


class KeepingTier:
    """Takes everything."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, list[int], list[int]]] = []

    def on_evict(self, namespace: str, prefix: bytes, block_ids: list[int]) -> bool:
        token_ids = list(memoryview(prefix).cast("I"))
        self.taken.append((namespace, token_ids, block_ids))
        return True


def test_a_tier_owns_evicted_blocks_until_it_releases_them() -> None:
    tier = KeepingTier()
    kv = KVCacheManager([full()], 8, 4, tier=tier)  # type: ignore[arg-type]
    (old,) = cache(kv, text(0, 16))
    request = make_request(text(500, 24))
    assert not admit(kv, request), "two blocks are on their way to the tier"
    assert tier.taken == [("", text(0, 16), [old[3]]), ("", text(0, 12), [old[2]])]
    assert kv.num_usable_blocks == 6
    assert not admit(kv, request) and len(tier.taken) == 2, "they are counted on, so no more leave"
    for _, _, ids in tier.taken:
        kv.release_transfer(ids)
    assert admit(kv, request)
    kv.check_integrity([request])


def test_reset_makes_the_next_match_start_from_nothing() -> None:
    kv = KVCacheManager([full()], 20, 4)
    cache(kv, text(0, 16))
    running = make_request(text(70, 9), "running")
    assert admit(kv, running)
    run(kv, running)
    assert not kv.reset_prefix_cache()
    assert kv.match(make_request(text(0, 16)), 15).num_tokens == 0
    kv.free(running)
    assert kv.reset_prefix_cache() and kv.pool.num_free == 20


def test_stats_tell_slots_with_tokens_from_slots_that_are_held() -> None:
    kv = KVCacheManager([full()], 20, 4)
    cache(kv, text(0, 16))
    request = make_request([*text(0, 16), 99])
    assert admit(kv, request)
    request.num_computed_tokens = 17
    stats = kv.stats()
    assert (stats.num_query_tokens, stats.num_hit_tokens) == (33, 16)
    assert (stats.num_request_slots, stats.num_token_slots, stats.num_fenced_slots) == (20, 17, 0)
    request.last_step_id = 9
    kv.free(request)
    stats = kv.stats()
    assert (stats.num_request_slots, stats.num_token_slots, stats.num_fenced_slots) == (0, 0, 4)


def test_the_control_plane_stays_free_of_torch() -> None:
    import subprocess
    import sys

    code = "import sys, headrace.core.kv_cache_manager; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
