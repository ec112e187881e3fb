"""What the reference attention op reads: work lists, the geometry of its tensors, and items sorted by shape.

Items are sorted into shape classes: query rows rounded up to a power of two, KV slots rounded up to a multiple that
grows with the length. An item's class depends on the item alone, and each item is computed as its own matrix product
of its class's size, so results do not depend on which other items are there.

Legend: H query heads, K KV heads, D head dim, B block size.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MAX_CHUNK_BYTES = 4 << 20
"""Scratch memory of a chunk of several items: small enough to stay in a core's share of the cache."""

MAX_BAG_GROUP = 4
"""Query heads a KV head up to which summing values in place beats gathering them and a matrix product."""


class AttentionWork(Protocol):
    """A work list, as ``headrace.attention.metadata.AttentionPlan`` documents it."""

    block_size: int
    window: int | None
    block_table: torch.Tensor
    num_tokens: int
    num_items: int
    num_rows: int
    num_partials: int
    num_reductions: int
    query_rows: torch.Tensor
    row_positions: torch.Tensor
    item_request: torch.Tensor
    item_kv_start: torch.Tensor
    item_kv_end: torch.Tensor
    item_row_start: torch.Tensor
    item_num_rows: torch.Tensor
    item_partial_start: torch.Tensor
    reduce_rows: torch.Tensor
    reduce_starts: torch.Tensor
    reduce_slots: torch.Tensor
    derived: dict[Hashable, Any]


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the op's tensors look like. Shapes and strides count elements.

    cache_shape, cache_strides: of k_cache and v_cache [num_blocks, K, B, D]; the first three strides are multiples
        of D.
    cache_dtype, query_dtype: storage types.
    value_rows: rows of D from a key to its value, where both caches are one memory; None: they are not.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cache_shape: tuple[int, ...]
    cache_strides: tuple[int, ...]
    cache_dtype: torch.dtype
    query_dtype: torch.dtype
    value_rows: int | None

    @property
    def group_size(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def dtype(self) -> torch.dtype:
        """Type of scores and sums."""
        return torch.promote_types(torch.float32, self.query_dtype)

    @property
    def num_cache_rows(self) -> int:
        """Rows of D that k_cache spans, gaps between its blocks included."""
        steps = zip(self.cache_shape[:3], self.cache_strides[:3], strict=True)
        return sum((size - 1) * stride for size, stride in steps) // self.head_dim + 1

    @property
    def sums_in_bags(self) -> bool:
        """Whether single rows sum values where they lie, as ``embedding_bag`` does, instead of gathering them first.

        It reads each value once for every head of the group and so pays only while groups are small, and it would
        round weights to the cache's type.
        """
        return self.group_size <= MAX_BAG_GROUP and self.cache_dtype == self.dtype == torch.float32

    def rows_of_tokens(self, num_tokens: int, stride: int) -> int:
        """Rows of D from the first token's first head to the last token's last query head."""
        return (num_tokens - 1) * (stride // self.head_dim) + self.num_heads

    def scratch_elements(self, num_rows: int, num_slots: int) -> int:
        """Scratch that one item of M rows and S slots needs: K and V, scores and weights, queries and outputs."""
        query_rows = num_rows * self.num_heads
        kv_rows = 2 * num_slots * self.num_kv_heads
        return kv_rows * self.head_dim + 2 * query_rows * (num_slots + self.head_dim)


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """n items of M rows by S slots; is_masked: some row of them misses some slot; is_final: no partials."""

    num_items: int
    num_rows: int
    num_slots: int
    is_masked: bool
    is_final: bool


class WorkItems:
    """A work list's arrays on the host, and what follows from them for some of its items."""

    def __init__(self, work: AttentionWork) -> None:
        count = work.num_items
        self.num_rows = _host(work.item_num_rows, count)
        self.row_start = _host(work.item_row_start, count)
        self.kv_start = _host(work.item_kv_start, count)
        self.kv_end = _host(work.item_kv_end, count)
        self.partial_start = _host(work.item_partial_start, count)
        self._request = _host(work.item_request, count)
        self._tokens = _host(work.query_rows, work.num_rows)
        self._positions = _host(work.row_positions, work.num_rows)
        self._block_table = work.block_table.cpu().numpy()
        self._block_size = work.block_size
        self._window = work.window

    def chunks(self, geometry: Geometry) -> list[tuple[ChunkShape, Ints]]:
        """Items by class, in chunks of bounded scratch memory."""
        lengths = self.kv_end - self.kv_start
        rows, slots = _round_rows(self.num_rows), _round_slots(lengths)
        is_single = rows == 1
        # single rows count as masked always: their mask costs little, and so their classes are fewer
        is_masked = is_single if is_single.all() else is_single | (slots != lengths) | self._hides_keys()
        is_final = self.partial_start < 0
        key = (rows << 34) | (slots << 2) | (is_masked << 1) | is_final
        order = np.argsort(key, kind="stable")
        key = key[order]
        bounds = [0, *(np.flatnonzero(key[1:] != key[:-1]) + 1).tolist(), len(key)]
        chunks: list[tuple[ChunkShape, Ints]] = []
        for start, stop in pairwise(bounds):
            first = order[start]
            shape = (int(rows[first]), int(slots[first]), bool(is_masked[first]), bool(is_final[first]))
            item_bytes = geometry.scratch_elements(*shape[:2]) * geometry.dtype.itemsize
            step = max(1, MAX_CHUNK_BYTES // item_bytes)
            for at in range(start, stop, step):
                items = order[at : min(at + step, stop)]
                chunks.append((ChunkShape(len(items), *shape), items))
        return chunks

    def rows(self, items: Ints, num_rows: int) -> tuple[Ints, Ints, Bools]:
        """Tokens, positions and whether it is a true row, each [n, M]; rows of padding repeat the item's last."""
        step = np.arange(num_rows)
        last = self.num_rows[items, None] - 1
        row = np.minimum(step, last) + self.row_start[items, None]
        return self._tokens[row], self._positions[row], step <= last

    def cache_rows(self, items: Ints, num_slots: int, geometry: Geometry) -> Ints:
        """[n, K, S]: rows of D in the key cache. Slots of padding repeat the item's last key, so that nothing outside
        the item's range is ever read."""
        block_stride, head_stride, slot_stride = (
            stride // geometry.head_dim for stride in geometry.cache_strides[:3]
        )
        key = np.minimum(self.kv_start[items, None] + np.arange(num_slots), self.kv_end[items, None] - 1)
        index = key // self._block_size
        block = self._block_table[self._request[items, None], index]
        rows: Ints = block * np.int64(block_stride)
        rows += (key - index * self._block_size) * slot_stride
        return rows[:, None] + np.arange(geometry.num_kv_heads)[:, None] * head_stride

    def hidden(self, items: Ints, num_slots: int, positions: Ints) -> Bools:
        """[n, M, S]: slots that a row, at positions [n, M], must not see; those of padding too."""
        key = self.kv_start[items, None, None] + np.arange(num_slots)
        hidden: Bools = key >= np.minimum(self.kv_end[items, None], positions + 1)[:, :, None]
        if self._window is not None:
            hidden |= key <= (positions - self._window)[:, :, None]
        return hidden

    def _hides_keys(self) -> Bools:
        """[items]: whether some row of the item must not see some key of its range."""
        bounds = np.stack((self.row_start, self.row_start + self.num_rows), axis=1).ravel()
        padded = np.append(self._positions, 0)
        hides: Bools = np.minimum.reduceat(padded, bounds)[::2] < self.kv_end - 1
        if self._window is not None:
            hides |= np.maximum.reduceat(padded, bounds)[::2] - self._window >= self.kv_start
        return hides


def slot_owners(work: AttentionWork) -> Ints:
    """[P]: the reduction that each partial belongs to."""
    starts = _host(work.reduce_starts, work.num_reductions + 1)
    owners = np.empty(work.num_partials, dtype=np.int64)
    slots = _host(work.reduce_slots, work.num_partials)
    owners[slots] = np.repeat(np.arange(work.num_reductions), starts[1:] - starts[:-1])
    return owners


def _host(tensor: torch.Tensor, length: int) -> Ints:
    return tensor[:length].cpu().numpy().astype(np.int64)


def _round_rows(counts: Ints) -> Ints:
    """Counts rounded up to a power of two."""
    return np.left_shift(1, np.frexp(counts - 0.5)[1].astype(np.int64))


def _round_slots(lengths: Ints) -> Ints:
    """Lengths rounded up to a multiple of 16, or of a quarter of the power of two below, where that is more."""
    unit = np.maximum(16, np.left_shift(1, np.frexp(lengths)[1].astype(np.int64)) // 8)
    return -(-lengths // unit) * unit
