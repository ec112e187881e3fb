"""How the reference attention op batches work items: chunks of items of one shape, with indices and scratch memory.

Items are sorted by shape class: query rows rounded up to a power of two, KV slots rounded up to a multiple that
grows with the length. An item's class depends on the item alone, and every item of a chunk is computed as its own
matrix product of the class's size, so results do not depend on what else is in the chunk.

Legend: n items of a chunk, H query heads, K KV heads, G = H / K, M padded query rows, S padded KV slots, D head dim,
B block size, P partials.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Rows = slice | torch.Tensor

HIDDEN_SCORE = -1e30
"""Score of a key that a row must not see. Finite, so that a row that sees no key of an item yields a partial of
weight zero instead of NaN; any true score is above it, and exp(HIDDEN_SCORE - score) is zero."""

MAX_CHUNK_BYTES = 4 << 20
"""Scratch memory of one chunk of several items: small enough to stay in a core's share of the cache."""

MAX_KEPT_BYTES = 256 << 20
"""Index memory that a plan keeps for later layers; beyond it the indices of the remaining chunks are rebuilt."""


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
    """What chunks depend on besides the work list. Shapes and strides count elements.

    token_stride, out_stride: between tokens of qkv and of out, multiples of D.
    cache_shape, cache_strides: of k_cache [num_blocks, K, B, D]; the first three strides are multiples of D.
    value_distance: bytes from the start of k_cache to that of v_cache.
    cache_dtype, query_dtype: storage types.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    token_stride: int
    out_stride: int
    cache_shape: tuple[int, ...]
    cache_strides: tuple[int, ...]
    value_distance: int
    cache_dtype: torch.dtype
    query_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """Type of scores and sums."""
        return torch.promote_types(torch.float32, self.query_dtype)

    @property
    def value_offset(self) -> int | None:
        """Rows of D from a key to its value where both lie in one block, so that one gather fetches both."""
        distance = self.value_distance // self.cache_dtype.itemsize
        return distance // self.head_dim if 0 < distance < self.cache_strides[0] else None

    @property
    def num_cache_rows(self) -> int:
        """Rows of D that one gather may reach from the start of k_cache."""
        steps = zip(self.cache_shape[:3], self.cache_strides[:3], strict=True)
        last = sum((size - 1) * stride for size, stride in steps) // self.head_dim
        return last + 1 + (self.value_offset or 0)

    def rows_of_tokens(self, num_tokens: int, stride: int) -> int:
        """Rows of D from the first token's first head to the last token's last query head."""
        return (num_tokens - 1) * (stride // self.head_dim) + self.num_heads


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """n items of M rows by S slots; is_masked: some row of them misses some slot; is_final: no partials."""

    num_items: int
    num_rows: int
    num_slots: int
    is_masked: bool
    is_final: bool


@dataclass(frozen=True, slots=True, eq=False)
class ChunkScratch:
    """Uncleared memory of the compute type for one chunk, shared with all other chunks of the plan.

    queries: [n*K*M*G, D]. keys, values: [n*K*S, D], the halves of ``both``. product: [n*K, M*G, D].
    keys_t, values_3d: the same memory as [n*K, D, S] and [n*K, S, D].
    scores, weights: [n*K, M*G, S]; scores_by_row: the scores as [n, K, M, G, S].
    """

    queries: torch.Tensor
    both: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    keys_t: torch.Tensor
    values_3d: torch.Tensor
    scores: torch.Tensor
    scores_by_row: torch.Tensor
    weights: torch.Tensor
    product: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """n work items of one shape.

    query_rows: [n*K*M*G], rows of qkv, or the range that they are.
    kv_rows: [n*K*S] rows of the key cache; with a value offset [2*n*K*S], keys first and then values.
    bias: [n*K, 1, S] of 0 or HIDDEN_SCORE, for items of one row; else None.
    hidden: [n, 1, M, 1, S] bool, slots that a row must not see; None when all are seen or ``bias`` says it.
    kept: [m] rows of the result that are not padding; None: all.
    target: rows of the output (when is_final), or of the partials, that the kept rows go to; a range when all are
        kept and go to consecutive rows.
    """

    shape: ChunkShape
    scratch: ChunkScratch
    query_rows: Rows
    kv_rows: torch.Tensor
    bias: torch.Tensor | None
    hidden: torch.Tensor | None
    kept: torch.Tensor | None
    target: Rows

    def index_bytes(self) -> int:
        """Bytes of the tensors that belong to this chunk alone."""
        tensors = (self.query_rows, self.kv_rows, self.bias, self.hidden, self.kept, self.target)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


class ChunkedWork:
    """A work list cut into chunks for one geometry. Made once per plan, iterated once per layer.

    Args:
        work: the plan; its tensors are read now and when a chunk is built.
        geometry: heads and strides.

    Attributes:
        is_joint: chunks' ``kv_rows`` fetch keys and values at once.
        num_query_rows, num_cache_rows, num_out_rows: rows of D that qkv, k_cache and out span.
    """

    def __init__(self, work: AttentionWork, geometry: Geometry) -> None:
        self.geometry = geometry
        self._work = work
        self._device = work.block_table.device
        self.is_joint = geometry.value_offset is not None
        self.num_query_rows = geometry.rows_of_tokens(work.num_tokens, geometry.token_stride)
        self.num_cache_rows = geometry.num_cache_rows
        self.num_out_rows = geometry.rows_of_tokens(work.num_tokens, geometry.out_stride)
        count = work.num_items
        self._num_rows = _host(work.item_num_rows, count)
        self._row_start = _host(work.item_row_start, count)
        self._kv_start = _host(work.item_kv_start, count)
        self._kv_end = _host(work.item_kv_end, count)
        self._partial_start = _host(work.item_partial_start, count)
        self._request = _host(work.item_request, count)
        self._tokens = _host(work.query_rows, work.num_rows)
        self._positions = _host(work.row_positions, work.num_rows)
        self._block_table = work.block_table.cpu().numpy()
        self._members = self._classify()
        self._memory = self._allocate()
        self._chunks: list[Chunk | None] = [None] * len(self._members)
        self._kept_bytes = 0

    def __iter__(self) -> Iterator[Chunk]:
        for index, chunk in enumerate(self._chunks):
            if chunk is None:
                chunk = self._build(*self._members[index])
                self._kept_bytes += chunk.index_bytes()
                if self._kept_bytes <= MAX_KEPT_BYTES:
                    self._chunks[index] = chunk
            yield chunk

    @cached_property
    def partials(self) -> torch.Tensor:
        """[P*H, D]: outputs of the plan's partials."""
        shape = (self._work.num_partials * self.geometry.num_heads, self.geometry.head_dim)
        return torch.empty(shape, dtype=self.geometry.dtype, device=self._device)

    @cached_property
    def log_sums(self) -> torch.Tensor:
        """[P*H, 1]: log-sum-exps of the plan's partials."""
        return self.partials.new_empty((len(self.partials), 1))

    @cached_property
    def merged_tokens(self) -> torch.Tensor:
        """[reductions] int64: the token that each reduction writes."""
        return self._to_device(_host(self._work.reduce_rows, self._work.num_reductions))

    @cached_property
    def owner_of_slot(self) -> torch.Tensor:
        """[P] int64: the reduction that each partial belongs to."""
        work = self._work
        sizes = np.diff(_host(work.reduce_starts, work.num_reductions + 1))
        owners = np.empty(work.num_partials, dtype=np.int64)
        owners[_host(work.reduce_slots, work.num_partials)] = np.repeat(np.arange(len(sizes)), sizes)
        return self._to_device(owners)

    def _classify(self) -> list[tuple[ChunkShape, Ints]]:
        """Items by class, cut into chunks of bounded scratch memory."""
        lengths = self._kv_end - self._kv_start
        rows = _round_rows(self._num_rows)
        slots = _round_slots(lengths)
        # a mask is cheap for single rows: one class less for each length
        is_masked = (rows == 1) | (slots != lengths) | self._hides_keys()
        is_final = self._partial_start < 0
        key = (rows << 34) | (slots << 2) | (is_masked << 1) | is_final
        order = np.argsort(key, kind="stable")
        bounds = np.flatnonzero(np.diff(key[order], prepend=-1, append=-1)).tolist()
        members: list[tuple[ChunkShape, Ints]] = []
        for start, stop in pairwise(bounds):
            first = order[start]
            shape = (int(rows[first]), int(slots[first]), bool(is_masked[first]), bool(is_final[first]))
            step = max(1, MAX_CHUNK_BYTES // self._item_bytes(*shape[:2]))
            for at in range(start, stop, step):
                items = order[at : min(at + step, stop)]
                members.append((ChunkShape(len(items), *shape), items))
        return members

    def _hides_keys(self) -> Bools:
        """[items]: whether some row of the item must not see some key of its range."""
        bounds = np.stack((self._row_start, self._row_start + self._num_rows), axis=1).ravel()
        padded = np.append(self._positions, 0)
        hides: Bools = np.minimum.reduceat(padded, bounds)[::2] < self._kv_end - 1
        if self._work.window is not None:
            hides |= np.maximum.reduceat(padded, bounds)[::2] - self._work.window >= self._kv_start
        return hides

    def _item_bytes(self, num_rows: int, num_slots: int) -> int:
        g = self.geometry
        query_rows = num_rows * g.num_heads
        kv_rows = 2 * num_slots * g.num_kv_heads
        return (kv_rows * g.head_dim + 2 * query_rows * (num_slots + g.head_dim)) * g.dtype.itemsize

    def _allocate(self) -> dict[str, torch.Tensor]:
        """Flat memory for the largest chunk."""
        g = self.geometry
        shapes = [shape for shape, _ in self._members]
        queries = max(s.num_items * s.num_rows for s in shapes) * g.num_heads * g.head_dim
        keys = max(s.num_items * s.num_slots for s in shapes) * g.num_kv_heads * g.head_dim
        scores = max(s.num_items * s.num_rows * s.num_slots for s in shapes) * g.num_heads
        sizes = {
            "queries": queries,
            "both": 2 * keys,
            "scores": scores,
            "weights": scores,
            "product": queries,
        }
        return {name: torch.empty(size, dtype=g.dtype, device=self._device) for name, size in sizes.items()}

    def _scratch(self, shape: ChunkShape) -> ChunkScratch:
        g = self.geometry
        n, rows, slots = shape.num_items, shape.num_rows, shape.num_slots
        batch, group = n * g.num_kv_heads, g.num_heads // g.num_kv_heads

        def memory(name: str, *dims: int) -> torch.Tensor:
            return self._memory[name][: math.prod(dims)].view(dims)

        both = memory("both", 2, batch * slots, g.head_dim)
        keys, values = both.unbind()
        scores = memory("scores", batch, rows * group, slots)
        return ChunkScratch(
            queries=memory("queries", batch * rows * group, g.head_dim),
            both=both.view(-1, g.head_dim),
            keys=keys,
            values=values,
            keys_t=keys.view(batch, slots, g.head_dim).transpose(1, 2),
            values_3d=values.view(batch, slots, g.head_dim),
            scores=scores,
            scores_by_row=scores.view(n, g.num_kv_heads, rows, group, slots),
            weights=memory("weights", batch, rows * group, slots),
            product=memory("product", batch, rows * group, g.head_dim),
        )

    def _build(self, shape: ChunkShape, items: Ints) -> Chunk:
        g = self.geometry
        step = np.arange(shape.num_rows)
        is_row = step < self._num_rows[items, None]
        # rows of padding repeat the item's last
        row = np.minimum(step, self._num_rows[items, None] - 1) + self._row_start[items, None]
        tokens = self._tokens[row]
        if shape.is_final:
            target = self._by_head(tokens * (g.out_stride // g.head_dim))
        else:
            target = self._by_head((self._partial_start[items, None] + step) * g.num_heads)
        kept = None
        if not is_row.all():
            kept = np.flatnonzero(np.broadcast_to(is_row[:, None, :, None], target.shape))
        hidden = bias = None
        if shape.is_masked:
            hidden = self._to_device(self._hidden(items, shape.num_slots, self._positions[row]))
            if shape.num_rows == 1:
                hidden_heads = hidden.view(-1, 1, 1, shape.num_slots).expand(-1, g.num_kv_heads, -1, -1)
                bias = torch.zeros_like(hidden_heads, dtype=g.dtype).masked_fill_(hidden_heads, HIDDEN_SCORE)
                bias, hidden = bias.view(-1, 1, shape.num_slots), None
        return Chunk(
            shape=shape,
            scratch=self._scratch(shape),
            query_rows=self._rows(self._by_head(tokens * (g.token_stride // g.head_dim))),
            kv_rows=self._to_device(self._kv_rows(items, shape.num_slots)),
            bias=bias,
            hidden=hidden,
            kept=None if kept is None else self._to_device(kept),
            target=self._rows(target) if kept is None else self._to_device(target.reshape(-1)[kept]),
        )

    def _by_head(self, rows: Ints) -> Ints:
        """Rows [n, M] of each item's first head -> rows [n, K, M, G] of all heads."""
        g = self.geometry
        return rows[:, None, :, None] + np.arange(g.num_heads).reshape(1, g.num_kv_heads, 1, -1)

    def _kv_rows(self, items: Ints, num_slots: int) -> Ints:
        """Cache rows of the items' slots. Slots of padding repeat the item's last key, so that nothing outside the
        item's range is ever read."""
        g = self.geometry
        block_stride, head_stride, slot_stride = (stride // g.head_dim for stride in g.cache_strides[:3])
        key = np.minimum(self._kv_start[items, None] + np.arange(num_slots), self._kv_end[items, None] - 1)
        index, offset = np.divmod(key, self._work.block_size)
        block = self._block_table[self._request[items, None], index].astype(np.int64)
        rows = (block * block_stride + offset * slot_stride)[:, None]
        rows = rows + np.arange(g.num_kv_heads)[:, None] * head_stride
        if g.value_offset is not None:
            rows = np.stack((rows, rows + g.value_offset))
        return rows.reshape(-1)

    def _hidden(self, items: Ints, num_slots: int, positions: Ints) -> Bools:
        """[n, 1, M, 1, S]: slots that a row, at positions [n, M], must not see; those of padding too."""
        key = self._kv_start[items, None, None] + np.arange(num_slots)
        end = np.minimum(self._kv_end[items, None], positions + 1)[:, :, None]
        hidden: Bools = key >= end
        if self._work.window is not None:
            hidden |= key <= (positions - self._work.window)[:, :, None]
        return hidden[:, None, :, None]

    def _rows(self, index: Ints) -> Rows:
        """Row numbers as a tensor, or as a slice where they are consecutive, which needs no copy."""
        flat = index.reshape(-1)
        first = int(flat[0])
        if flat[-1] - first == len(flat) - 1 and (np.diff(flat) == 1).all():
            return slice(first, first + len(flat))
        return self._to_device(flat)

    def _to_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _host(tensor: torch.Tensor, length: int) -> Ints:
    return tensor[:length].cpu().numpy().astype(np.int64)


def _round_rows(counts: Ints) -> Ints:
    """Counts rounded up to a power of two."""
    return np.left_shift(1, np.frexp(counts - 0.5)[1].astype(np.int64))


def _round_slots(lengths: Ints) -> Ints:
    """Lengths rounded up to a multiple of 16, or of a quarter of the power of two below, where that is more."""
    unit = np.maximum(16, np.left_shift(1, np.frexp(lengths)[1].astype(np.int64)) // 8)
    return -(-lengths // unit) * unit
