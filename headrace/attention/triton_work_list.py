"""The planner of the Triton kernels: like ``headrace.attention.work_list``, but cut and ordered for a GPU.

A tile of few query rows (a decode) is short, any other long; short items come first, each kind by falling length, so
that the last programs to finish have little left to do. Everything is computed for all requests at once.

Legend: R requests, N gathered query rows, I items, P partial results, M merged rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.tiles import Ints, Tiles, ranges, step_tiles
from headrace.attention.work_list import group_by_token
from headrace.kernels.triton.attention_work import TileRows

_NEVER = 1 << 30


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How long the KV splits of a tile are: a power of two.

    A context is cut into at most ``max_splits``. A long tile is cut no finer than fills a GPU together with the other
    tiles of its request (or of its shared prefix), its sisters; tiles of a shared prefix, which are few, are cut
    finer. Short tiles (decodes) of a step share one cut, the cheapest: a few requests fill a GPU only in many parts,
    many do without, and then every cut costs the start of another unit and the merging of its result.

    Attributes:
        num_kv_heads: each is a unit of work of its own.
        min_short_tokens, min_long_tokens: the finest cut of short and of long tiles.
        num_short_cuts: how many cuts of short tiles are compared, each twice as long as the one before; with one, a
            row's keys are cut the same whatever the other requests of its step.
        min_shared_tokens: the finest cut of long tiles of a shared prefix.
        num_units, num_short_units: units of work that fill a GPU, of long and of short tiles.
        unit_tokens, merge_tokens: what a short unit costs beside its reading, and one whose result is merged, in
            tokens read (benchmarks/NOTES.md).
    """

    num_kv_heads: int
    min_short_tokens: int = 128
    num_short_cuts: int = 7
    min_long_tokens: int = 2048
    min_shared_tokens: int = 512
    max_splits: int = 32
    num_units: int = 264
    num_short_units: int = 528
    unit_tokens: int = 100
    merge_tokens: int = 150

    def short_cut(self, spans: Ints) -> int:
        """The cheapest cut of a step's short tiles, from how many keys each reads."""
        if len(spans) == 0 or self.num_short_cuts == 1:
            return self.min_short_tokens
        shifts = np.arange(self.num_short_cuts) + (self.min_short_tokens.bit_length() - 1)
        cuts = 1 << shifts
        units = spans + (cuts - 1)[:, None] >> shifts[:, None]
        num_units = units.sum(axis=1)
        merged = num_units - (units == 1).sum(axis=1)
        read = spans.sum() + self.unit_tokens * num_units + self.merge_tokens * merged
        last = np.minimum(cuts, spans.max()) / 2  # what others wait for at the end, on average
        return int(cuts[np.argmin(read * self.num_kv_heads / self.num_short_units + last)])

    def lengths(
        self,
        context: Ints,
        spans: Ints,
        num_sisters: Ints,
        is_short: npt.NDArray[np.bool_],
        is_shared: npt.NDArray[np.bool_],
    ) -> Ints:
        """Split length of each tile, from where its view ends (a shared prefix's: how long it is), ``context``, and
        how many keys it reads, ``spans``."""
        short = self.short_lengths(context, self.short_cut(spans[is_short]))
        if is_short.all():
            return short
        wanted = np.clip(self.num_units // (num_sisters * self.num_kv_heads), 1, self.max_splits)
        finest = np.where(is_shared, self.min_shared_tokens, self.min_long_tokens)
        long = np.maximum(_power_of_two(-(-context // wanted)), finest)
        return np.where(is_short, short, np.where(wanted > 1, long, _NEVER))

    def short_lengths(self, context: Ints, cut: int) -> Ints:
        """Split lengths of short tiles of a step whose cut is ``cut``."""
        if context.max(initial=0) <= self.max_splits * cut:
            return np.full(len(context), cut)
        return np.maximum(_power_of_two(-(-context // self.max_splits)), cut)


@dataclass(frozen=True, slots=True, eq=False)
class TritonWorkList:
    """The arrays of an ``AttentionPlan`` by name, on the host at their exact lengths; the first items are short."""

    arrays: dict[str, Ints]
    num_short: int

    def length(self, name: str) -> int:
        """Entries of one array."""
        return len(self.arrays[name])


def build_triton_work_list(metadata: AttentionMetadata, rows: TileRows, split: SplitRule) -> TritonWorkList:
    """Plan one step of one KV group. Reads lengths only, never the block table's entries."""
    query_lens = metadata.query_starts[1:] - metadata.query_starts[:-1]
    if len(query_lens) and not metadata.shared_prefixes and (query_lens == 1).all():
        return _cut_decodes(metadata.context_lens.astype(np.int64), metadata.window, split)
    return _cut(*step_tiles(metadata, rows.long), rows, split)


def _cut(tokens: Ints, positions: Ints, tiles: Tiles, rows: TileRows, split: SplitRule) -> TritonWorkList:
    """Cut every tile's range at multiples of its split length, order the items, number partials, list reductions."""
    is_short_tile = tiles.num_rows <= rows.short
    extent = tiles.high - np.where(tiles.is_shared, tiles.low, 0)
    spans = tiles.high - tiles.low
    length = split.lengths(extent, spans, tiles.num_sisters, is_short_tile, tiles.is_shared)
    first_split = tiles.low // length
    num_splits = (tiles.high - 1) // length - first_split + 1
    tile, index = ranges(num_splits)
    cut = (first_split[tile] + index) * length[tile]
    start = np.maximum(tiles.low[tile], cut)
    end = np.minimum(tiles.high[tile], cut + length[tile])
    is_partial = (tiles.is_merged | (num_splits > 1))[tile]
    order = np.argsort(start - end - np.where(is_short_tile[tile], _NEVER, 0), kind="stable")
    tile, start, end, is_partial = tile[order], start[order], end[order], is_partial[order]

    num_rows, row_start = tiles.num_rows[tile], tiles.row_start[tile]
    partial_rows = num_rows * is_partial
    item, offset = ranges(partial_rows)
    reduce_rows, reduce_starts, reduce_slots = group_by_token(tokens[row_start[item] + offset])
    arrays = {
        "query_rows": tokens,
        "row_positions": positions,
        "item_request": tiles.request[tile],
        "item_kv_start": start,
        "item_kv_end": end,
        "item_row_start": row_start,
        "item_num_rows": num_rows,
        "item_partial_start": np.where(is_partial, np.cumsum(partial_rows) - partial_rows, -1),
        "reduce_rows": reduce_rows,
        "reduce_starts": reduce_starts,
        "reduce_slots": reduce_slots,
    }
    return TritonWorkList(arrays, int(np.count_nonzero(is_short_tile[tile])))


def _cut_decodes(context: Ints, window: int | None, split: SplitRule) -> TritonWorkList:
    """One token a request and nothing shared. The general way comes to the same, but most steps are such ones, and the
    host has less than a step's time for them."""
    requests = np.arange(len(context))
    low = np.zeros_like(context) if window is None else np.maximum(context - window, 0)
    spans = context - low
    length = split.short_lengths(context, split.short_cut(spans))
    first_split = low // length
    num_splits = (context - 1) // length - first_split + 1
    if num_splits.max() == 1:
        tile = np.argsort(-spans, kind="stable")
        start, end = low[tile], context[tile]
        partial_start = np.full(len(tile), -1)
        nothing = np.empty(0, np.int64)
        reduce_rows, reduce_starts, reduce_slots = nothing, np.zeros(1, np.int64), nothing
    else:
        tile, index = ranges(num_splits)
        cut = (first_split[tile] + index) * length[tile]
        start, end = np.maximum(low[tile], cut), np.minimum(context[tile], cut + length[tile])
        order = np.argsort(start - end, kind="stable")
        tile, start, end = tile[order], start[order], end[order]
        is_partial = num_splits[tile] > 1
        partial_start = np.where(is_partial, np.cumsum(is_partial) - 1, -1)
        reduce_rows, reduce_starts, reduce_slots = group_by_token(tile[is_partial])
    arrays = {
        "query_rows": requests,
        "row_positions": context - 1,
        "item_request": tile,
        "item_kv_start": start,
        "item_kv_end": end,
        "item_row_start": tile,
        "item_num_rows": np.ones(len(tile), np.int64),
        "item_partial_start": partial_start,
        "reduce_rows": reduce_rows,
        "reduce_starts": reduce_starts,
        "reduce_slots": reduce_slots,
    }
    return TritonWorkList(arrays, len(tile))


def _power_of_two(values: Ints) -> Ints:
    """The next power of two."""
    exponents = np.ceil(np.log2(np.maximum(values, 1))).astype(np.int64)
    return np.left_shift(np.ones_like(exponents), exponents)
