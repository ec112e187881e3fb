"""The planner: cuts one step's attention into work items and reductions, on the host, without loops over requests.

Query rows of a request are cut into tiles; each tile's visible KV range is cut at multiples of a fixed split length.
A shared prefix is taken out of its requests' ranges and planned once for tiles of rows gathered from all of them
(cascade); rows with several items get a reduction. See ``AttentionPlan`` for what the arrays mean.

Legend: R requests, N gathered query rows, I items, P partial results, M merged rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.attention.metadata import AttentionMetadata, IntArray

Ints = npt.NDArray[np.int64]


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


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """Tiles of query rows, each with the KV range [low, high) that some of its rows see.

    row_start, num_rows: into the gathered query rows.
    request: whose block table holds the range.
    is_merged: the rows have items elsewhere too, so even a single item writes partials.
    """

    row_start: Ints
    num_rows: Ints
    request: Ints
    low: Ints
    high: Ints
    is_merged: npt.NDArray[np.bool_]


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
    request = np.repeat(np.arange(len(query_lens)), query_lens)
    tokens = np.arange(len(request))
    positions = tokens + (context_lens - query_starts[1:])[request]

    prefix_lens = np.zeros_like(context_lens)
    for group in metadata.shared_prefixes:
        ends = prefix_lens[group.requests]
        prefix_lens[group.requests] = np.maximum(ends, group.num_blocks * metadata.block_size)
    tiles = _request_tiles(query_starts, context_lens, prefix_lens, metadata.window, tiling)
    if metadata.shared_prefixes:
        shared_rows, shared_tiles = _prefix_tiles(metadata, positions, tiling)
        shared_tiles.row_start[:] += len(tokens)
        tokens = np.concatenate((tokens, shared_rows))
        tiles = _concatenate(tiles, shared_tiles)
    return _cut(tokens, positions, tiles, tiling)


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


def _request_tiles(
    query_starts: Ints, context_lens: Ints, prefix_lens: Ints, window: int | None, tiling: Tiling
) -> _Tiles:
    """Each request's own rows against its own range, from the end of its shared prefix on."""
    query_lens = np.diff(query_starts)
    request, index = ranges(-(-query_lens // tiling.tile_rows))
    done = index * tiling.tile_rows
    num_rows = np.minimum(query_lens[request] - done, tiling.tile_rows)
    first = (context_lens - query_lens)[request] + done
    low = prefix_lens[request]
    is_merged = low > 0
    if window is not None:
        low = np.maximum(low, first - (window - 1))
    return _Tiles(query_starts[request] + done, num_rows, request, low, first + num_rows, is_merged)


def _prefix_tiles(metadata: AttentionMetadata, positions: Ints, tiling: Tiling) -> tuple[Ints, _Tiles]:
    """Rows [N'] gathered from the requests of each shared prefix, and their tiles against it."""
    groups = metadata.shared_prefixes
    starts = metadata.query_starts.astype(np.int64)
    members = np.concatenate([group.requests for group in groups])
    member_rows = (starts[1:] - starts[:-1])[members]
    member, offset = ranges(member_rows)
    rows = starts[members][member] + offset

    last_members = np.cumsum([len(group.requests) for group in groups])
    group_ends = np.cumsum(member_rows)[last_members - 1]
    group_rows = np.diff(group_ends, prepend=0)
    group, index = ranges(-(-group_rows // tiling.tile_rows))
    done = index * tiling.tile_rows
    row_start = (group_ends - group_rows)[group] + done
    num_rows = np.minimum(group_rows[group] - done, tiling.tile_rows)
    # the request of a tile's earliest row holds all blocks that its rows see; later ones may have released some
    num_requests = len(starts) - 1
    earliest = np.minimum.reduceat(positions[rows] * num_requests + members[member], row_start)
    request = earliest % num_requests
    high = np.array([entry.num_blocks for entry in groups])[group] * metadata.block_size
    low = np.array([entry.first_block for entry in groups])[group] * metadata.block_size
    if metadata.window is not None:
        low = np.maximum(low, earliest // num_requests - (metadata.window - 1))
    seen = low < high
    row_start, num_rows, request, low, high = (x[seen] for x in (row_start, num_rows, request, low, high))
    return rows, _Tiles(row_start, num_rows, request, low, high, np.ones(len(low), dtype=bool))


def _cut(tokens: Ints, positions: Ints, tiles: _Tiles, tiling: Tiling) -> WorkList:
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
        row_positions=_int32(positions[tokens]),
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


def ranges(counts: Ints) -> tuple[Ints, Ints]:
    """For counts [2, 3]: owners [0, 0, 1, 1, 1] and indices within them [0, 1, 0, 1, 2]."""
    ends = np.cumsum(counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (ends - counts)[owner]


def _concatenate(a: _Tiles, b: _Tiles) -> _Tiles:
    return _Tiles(
        *(np.concatenate((getattr(a, name), getattr(b, name))) for name in _Tiles.__dataclass_fields__)
    )


def _int32(values: Ints) -> IntArray:
    return values.astype(np.int32)
