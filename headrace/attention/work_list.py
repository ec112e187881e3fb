"""The planner: cuts one step's attention into work items and reductions, on the host, without loops over requests.

The visible KV range of each of a step's ``Tiles`` is cut at multiples of a fixed split length; rows with several items
get a reduction. See ``AttentionPlan`` for what the arrays mean.

Legend: R requests, N gathered query rows, I items, P partial results, M merged rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.attention.metadata import AttentionMetadata, IntArray
from headrace.attention.tiles import Ints, Tiles, ranges, step_tiles


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a backend wants its work cut.

    tile_rows: query rows in one item at most.
    kv_split_tokens: KV range of one item at most, for tiles of more than ``short_rows`` rows.
    short_rows, short_split_tokens: tiles of up to ``short_rows`` rows (decodes) are cut at this length instead.
    """

    tile_rows: int
    kv_split_tokens: int
    short_rows: int
    short_split_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """The arrays of an ``AttentionPlan``, int32 on the host, at their exact lengths."""

    query_rows: IntArray
    row_positions: IntArray
    item_request: IntArray
    item_kv_start: IntArray
    item_kv_end: IntArray
    item_row_start: IntArray
    item_num_rows: IntArray
    item_partial_start: IntArray
    reduce_rows: IntArray
    reduce_starts: IntArray
    reduce_slots: IntArray


def build_work_list(metadata: AttentionMetadata, tiling: Tiling) -> WorkList:
    """Plan one step of one KV group. Reads lengths only, never the block table's entries."""
    query_starts = metadata.query_starts.astype(np.int64)
    context_lens = metadata.context_lens.astype(np.int64)
    query_lens = np.diff(query_starts)
    if (query_lens == 1).all() and not metadata.shared_prefixes:
        low = np.maximum(context_lens - (metadata.window or context_lens), 0)
        split = tiling.short_split_tokens if tiling.short_rows else tiling.kv_split_tokens
        if (low // split == (context_lens - 1) // split).all():
            return _one_item_each(low, context_lens)
    return _cut(*step_tiles(metadata, tiling.tile_rows), tiling)


def _one_item_each(low: Ints, context_lens: Ints) -> WorkList:
    """Decodes whose keys [low, context_lens) are one item each. The general way comes to the same, but most steps are
    such ones, and one request's has no time for it."""
    count = len(context_lens)
    order, nothing = np.arange(count, dtype=np.int32), np.empty(0, dtype=np.int32)
    return WorkList(
        query_rows=order,
        row_positions=_int32(context_lens - 1),
        item_request=order,
        item_kv_start=_int32(low),
        item_kv_end=_int32(context_lens),
        item_row_start=order,
        item_num_rows=np.ones(count, dtype=np.int32),
        item_partial_start=np.full(count, -1, dtype=np.int32),
        reduce_rows=nothing,
        reduce_starts=np.zeros(1, dtype=np.int32),
        reduce_slots=nothing,
    )


def _cut(tokens: Ints, positions: Ints, tiles: Tiles, tiling: Tiling) -> WorkList:
    """Cut every tile's range at multiples of its split length; number partials and list reductions. Items come by
    falling work, so that the last threads to finish have little left; partials keep the order of their tiles."""
    is_short = tiles.num_rows <= tiling.short_rows
    split = np.where(is_short, tiling.short_split_tokens, tiling.kv_split_tokens)
    first_split = tiles.low // split
    num_splits = (tiles.high - 1) // split - first_split + 1
    tile, index = ranges(num_splits)
    split_start = (first_split[tile] + index) * split[tile]
    num_rows = tiles.num_rows[tile]
    row_start = tiles.row_start[tile]

    is_partial = (tiles.is_merged | (num_splits > 1))[tile]
    partial_rows = num_rows * is_partial
    partial_start = np.where(is_partial, np.cumsum(partial_rows) - partial_rows, -1)
    item, offset = ranges(partial_rows)
    reduce_rows, reduce_starts, reduce_slots = group_by_token(tokens[row_start[item] + offset])
    start = np.maximum(tiles.low[tile], split_start)
    end = np.minimum(tiles.high[tile], split_start + split[tile])
    order = np.argsort((start - end) * num_rows, kind="stable")
    return WorkList(
        query_rows=_int32(tokens),
        row_positions=_int32(positions),
        item_request=_int32(tiles.request[tile][order]),
        item_kv_start=_int32(start[order]),
        item_kv_end=_int32(end[order]),
        item_row_start=_int32(row_start[order]),
        item_num_rows=_int32(num_rows[order]),
        item_partial_start=_int32(partial_start[order]),
        reduce_rows=_int32(reduce_rows),
        reduce_starts=_int32(reduce_starts),
        reduce_slots=_int32(reduce_slots),
    )


def group_by_token(token_of_slot: Ints) -> tuple[Ints, Ints, Ints]:
    """Partials [P] sorted by their token: (distinct tokens [M], starts [M+1], slots [P])."""
    slots = np.argsort(token_of_slot, kind="stable")
    ordered = token_of_slot[slots]
    is_first = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    firsts = np.flatnonzero(is_first)
    return ordered[firsts], np.append(firsts, len(ordered)), slots


def _int32(values: Ints) -> IntArray:
    return values.astype(np.int32)
