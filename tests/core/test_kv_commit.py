"""When committed tokens enter the tree and old sliding blocks leave."""

from __future__ import annotations

from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.kv_commit import ANSWER_RUN_BLOCKS
from headrace.core.request import Request
from tests.core.kv_simulation import full, make_request, sliding


def started(specs: list[KVCacheSpec], prompt: list[int], room: int) -> tuple[KVCacheManager, Request]:
    kv = KVCacheManager(specs, 100, 4)
    request = make_request(prompt)
    assert kv.admit(request, None, room, step_id=1)
    request.last_step_id = 1
    return kv, request


def commit(kv: KVCacheManager, request: Request, num_tokens: int) -> None:
    request.token_ids += range(1000 + request.num_tokens, 1000 + num_tokens + 1)
    request.num_computed_tokens = request.num_committed_tokens = num_tokens
    kv.commit(request)
    kv.check_integrity([request])


def cached(kv: KVCacheManager, request: Request) -> int:
    return kv.match(make_request(list(request.token_ids), "other"), request.num_tokens).num_full_blocks


def test_prompt_blocks_are_shared_as_soon_as_they_are_full() -> None:
    kv, request = started([full()], list(range(18)), 60)
    for num_tokens, blocks in ((3, 0), (4, 1), (11, 2), (16, 4)):
        commit(kv, request, num_tokens)
        assert cached(kv, request) == blocks


def test_answer_blocks_are_shared_in_runs_and_at_the_end() -> None:
    kv, request = started([full()], list(range(16)), 80)
    commit(kv, request, 16)
    for num_tokens in range(17, 16 + ANSWER_RUN_BLOCKS * 4):
        commit(kv, request, num_tokens)
        assert cached(kv, request) == 4
    commit(kv, request, 16 + ANSWER_RUN_BLOCKS * 4)
    assert cached(kv, request) == 4 + ANSWER_RUN_BLOCKS
    commit(kv, request, 16 + ANSWER_RUN_BLOCKS * 4 + 9)
    kv.free(request)
    assert cached(kv, request) == 4 + ANSWER_RUN_BLOCKS + 2


def test_blocks_wholly_behind_the_window_are_released_and_fenced() -> None:
    kv, request = started([full(), sliding(6)], list(range(40)), 40)
    table = list(request.block_table[1])
    commit(kv, request, 8)
    assert request.block_table[1] == table, "position 8 reads from 3 on"
    commit(kv, request, 9)
    assert request.block_table[1] == [-1, *table[1:]], "position 9 reads from 4 on"
    assert kv.num_evictable_blocks == 1, "cached, and nobody's"
    commit(kv, request, 21)
    assert request.block_table[1] == [-1] * 4 + table[4:]
    assert -1 not in request.block_table[0]


def test_without_prefix_caching_released_blocks_wait_for_their_step_only() -> None:
    kv = KVCacheManager([sliding(6)], 20, 4, enable_prefix_caching=False)
    request = make_request(list(range(40)))
    assert kv.admit(request, None, 40, step_id=1)
    request.last_step_id = 3
    commit(kv, request, 25)
    assert kv.num_fenced_blocks == 5 and kv.num_evictable_blocks == 0
    kv.advance(3)
    assert kv.pool.num_free == 20 - 5
    commit(kv, request, 26)
    assert kv.pool.num_free == 20 - 5, "position 26 still reads token 21"


def test_windows_of_several_lengths_are_released_each_at_its_time() -> None:
    kv, request = started([sliding(5), full(), sliding(13), sliding(5)], list(range(40)), 40)
    commit(kv, request, 20)
    assert [table.count(-1) for table in request.block_table] == [4, 0, 2, 4]
    commit(kv, request, 24)
    assert [table.count(-1) for table in request.block_table] == [5, 0, 3, 5]
