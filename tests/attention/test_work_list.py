"""The planner: every visible (token, key) pair is in exactly one item, whatever the step looks like."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from headrace.attention.metadata import AttentionMetadata, PrefixGroup
from headrace.attention.work_list import Tiling, WorkList, build_work_list
from tests.attention.paged_cases import random_lens

TILING = Tiling(tile_rows=8, kv_split_tokens=32, short_rows=1, short_split_tokens=48)


def metadata_for(
    query_lens: list[int],
    context_lens: list[int],
    *,
    window: int | None = None,
    block_size: int = 4,
    prefixes: tuple[PrefixGroup, ...] = (),
) -> AttentionMetadata:
    return AttentionMetadata(
        query_starts=np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32),
        context_lens=np.array(context_lens, dtype=np.int32),
        block_table=torch.zeros(len(query_lens), 1, dtype=torch.int32),
        block_size=block_size,
        window=window,
        shared_prefixes=prefixes,
    )


def visible_pairs(metadata: AttentionMetadata) -> set[tuple[int, int]]:
    """All (token, key position) pairs that attention must cover, by definition."""
    pairs = set()
    for request, context in enumerate(metadata.context_lens):
        start, stop = metadata.query_starts[request : request + 2]
        for token in range(start, stop):
            position = context - stop + token
            lowest = 0 if metadata.window is None else max(0, position - metadata.window + 1)
            pairs |= {(token, key) for key in range(lowest, position + 1)}
    return pairs


def planned_pairs(work: WorkList, window: int | None) -> Counter[tuple[int, int]]:
    """How often the items cover each (token, key position) pair, by the documented meaning of the arrays."""
    pairs: Counter[tuple[int, int]] = Counter()
    for item in range(len(work.item_request)):
        for row in range(work.item_row_start[item], work.item_row_start[item] + work.item_num_rows[item]):
            position = work.row_positions[row]
            for key in range(work.item_kv_start[item], work.item_kv_end[item]):
                if key <= position and (window is None or key > position - window):
                    pairs[int(work.query_rows[row]), key] += 1
    return pairs


def check(metadata: AttentionMetadata, tiling: Tiling) -> WorkList:
    work = build_work_list(metadata, tiling)
    pairs = planned_pairs(work, metadata.window)
    assert set(pairs) == visible_pairs(metadata)
    assert set(pairs.values()) <= {1}

    assert all(array.dtype == np.int32 for array in vars_of(work).values())
    assert (work.item_kv_start < work.item_kv_end).all()
    assert (work.item_num_rows >= 1).all() and (work.item_num_rows <= tiling.tile_rows).all()
    is_short = work.item_num_rows <= tiling.short_rows
    split = np.where(is_short, tiling.short_split_tokens, tiling.kv_split_tokens)
    assert (work.item_kv_start // split == (work.item_kv_end - 1) // split).all(), "cut at multiples only"

    # each partial slot belongs to one (item, row), and is in the reduction of that row's token
    token_of_slot: dict[int, int] = {}
    tokens_without_partials = []
    for item in range(len(work.item_request)):
        rows = work.query_rows[work.item_row_start[item] :][: work.item_num_rows[item]].tolist()
        if work.item_partial_start[item] < 0:
            tokens_without_partials += rows
        for row, token in enumerate(rows):
            if work.item_partial_start[item] >= 0:
                slot = int(work.item_partial_start[item]) + row
                assert slot not in token_of_slot
                token_of_slot[slot] = token
    assert sorted(token_of_slot) == list(range(len(work.reduce_slots)))
    merged = {
        int(token): work.reduce_slots[work.reduce_starts[m] : work.reduce_starts[m + 1]].tolist()
        for m, token in enumerate(work.reduce_rows)
    }
    assert len(merged) == len(work.reduce_rows)
    by_token: dict[int, list[int]] = {}
    for slot, token in sorted(token_of_slot.items()):
        by_token.setdefault(token, []).append(slot)
    assert merged == by_token
    # a token is either final in its one item, or merged
    assert sorted(tokens_without_partials + list(merged)) == list(range(metadata.query_starts[-1]))
    return work


def vars_of(work: WorkList) -> dict[str, np.ndarray]:
    return {field.name: getattr(work, field.name) for field in dataclasses.fields(work)}


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_mixed_steps_are_covered_exactly(window: int | None) -> None:
    rng = np.random.default_rng(1)
    for _ in range(15):
        query_lens, context_lens = random_lens(rng, int(rng.integers(1, 6)), 100)
        check(metadata_for(query_lens, context_lens, window=window), TILING)


@pytest.mark.parametrize("window", [None, 3, 30])
def test_shared_prefixes_are_covered_exactly(window: int | None) -> None:
    rng = np.random.default_rng(2)
    for _ in range(15):
        query_lens, context_lens = random_lens(rng, 6, 40)
        blocks = [int(rng.integers(1, 9)) for _ in range(2)]
        groups = [np.array([4, 1, 2], dtype=np.int32), np.array([0, 5], dtype=np.int32)]
        for group, count in zip(groups, blocks, strict=True):
            for request in group:
                context_lens[request] += 4 * count
        prefixes = tuple(map(PrefixGroup, groups, blocks))
        check(metadata_for(query_lens, context_lens, window=window, prefixes=prefixes), TILING)


def test_levels_of_shared_prefixes_are_covered_exactly() -> None:
    rng = np.random.default_rng(7)
    for _ in range(15):
        query_lens, context_lens = random_lens(rng, 7, 40)
        outer, inner, innermost = np.array([5, 0, 2, 3]), np.array([0, 3]), np.array([3, 0])
        first = int(rng.integers(1, 9))
        second = first + int(rng.integers(1, 9))
        third = second + int(rng.integers(1, 9))
        for request in outer:
            context_lens[request] += 4 * (third if request in inner else first)
        prefixes = (
            PrefixGroup(inner, second, first),
            PrefixGroup(outer, first),
            PrefixGroup(innermost, third, second),
        )
        check(metadata_for(query_lens, context_lens, prefixes=prefixes), TILING)


def test_shared_prefix_is_read_once() -> None:
    prefix = PrefixGroup(np.arange(6, dtype=np.int32), 16)
    work = check(metadata_for([1] * 6, [70, 71, 72, 73, 74, 75], prefixes=(prefix,)), TILING)
    shared = work.item_kv_end <= 64
    assert shared.sum() == 2, "64 shared tokens, cut every 32, for the tile of all six rows"
    assert work.item_num_rows[shared].tolist() == [6, 6]
    assert work.item_kv_start[~shared].tolist() == [64] * 6


def test_prefix_tile_reads_the_table_that_still_holds_its_blocks() -> None:
    """With a window, the request that is furthest along has released blocks that the others still see."""
    prefix = PrefixGroup(np.array([0, 1], dtype=np.int32), 10)
    work = check(metadata_for([1, 1], [60, 45], window=20, prefixes=(prefix,)), TILING)
    shared = work.item_kv_end <= 40
    assert set(work.item_request[shared].tolist()) == {1}
    assert work.item_kv_start[shared].min() == 25


def test_requests_without_tokens_bring_no_items() -> None:
    work = check(metadata_for([0, 2, 0, 1, 0], [7, 9, 3, 5, 1]), TILING)
    assert work.item_request.tolist() == [1, 3]
    empty = check(metadata_for([0, 0], [4, 9]), TILING)
    assert len(empty.item_request) == 0 and len(empty.query_rows) == 0
    prefix = PrefixGroup(np.array([0, 1], dtype=np.int32), 1)
    check(metadata_for([0, 0, 1], [4, 9, 8], prefixes=(prefix,)), TILING)


def test_single_split_items_need_no_merge() -> None:
    work = build_work_list(metadata_for([1, 1, 8], [10, 48, 32]), TILING)
    assert work.item_partial_start.tolist() == [-1, -1, -1]
    assert len(work.reduce_slots) == 0


@pytest.mark.parametrize("window", [None, 5, 20, 60])
@pytest.mark.parametrize("context_lens", [[1], [48], [3, 40, 17], [48, 96], [49]])
def test_decodes_alone_are_planned_as_beside_a_prompt(context_lens: list[int], window: int | None) -> None:
    count = len(context_lens)
    alone = check(metadata_for([1] * count, context_lens, window=window), TILING)
    beside = build_work_list(metadata_for([1] * count + [2], [*context_lens, 2], window=window), TILING)
    found, expected = vars_of(alone), vars_of(beside)
    places = [np.lexsort((work.item_kv_start, work.item_request)) for work in (alone, beside)]
    for name, values in found.items():
        wanted = expected[name]
        if name.startswith("item"):  # which come by falling work
            values, wanted = values[places[0]], wanted[places[1]][: len(values)]
        np.testing.assert_array_equal(values, wanted if name.startswith("reduce") else wanted[: len(values)])


def test_items_come_by_falling_work() -> None:
    prefix = PrefixGroup(np.array([1, 2, 3], dtype=np.int32), 4)
    work = check(metadata_for([5, 1, 1, 1], [40, 70, 66, 90], prefixes=(prefix,)), TILING)
    amounts = (work.item_kv_end - work.item_kv_start) * work.item_num_rows
    assert len(amounts) > 4 and (np.diff(amounts) <= 0).all()


def test_window_skips_blocks_outside_it() -> None:
    work = build_work_list(metadata_for([1, 3], [1000, 500], window=10), TILING)
    assert work.item_kv_start.min() == 488
    assert (work.item_kv_end - work.item_kv_start).sum() <= 10 + 12


def test_a_request_is_cut_alike_in_any_company() -> None:
    rng = np.random.default_rng(3)
    query_lens, context_lens = random_lens(rng, 8, 300)
    together = build_work_list(metadata_for(query_lens, context_lens, window=100), TILING)
    for request, (query, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        alone = build_work_list(metadata_for([query], [context], window=100), TILING)
        mine = together.item_request == request
        for name in ("item_kv_start", "item_kv_end", "item_num_rows"):
            assert getattr(together, name)[mine].tolist() == getattr(alone, name).tolist()
