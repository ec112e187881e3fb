"""Chunks: work items of one shape that the reference attention op computes at once, with indices and scratch memory.

Legend: n items of a chunk, H query heads, K KV heads, G = H / K, M padded query rows, S padded KV slots, D head dim,
P partials.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.reference.attention_items import (
    AttentionWork,
    ChunkShape,
    Geometry,
    Ints,
    WorkItems,
    slot_owners,
)

Rows = slice | torch.Tensor

HIDDEN_SCORE = -1e30
"""Score of a key that a row must not see. Finite, so that a row that sees no key of an item yields a partial of
weight zero instead of NaN; any true score is above it, and exp(HIDDEN_SCORE - score) is zero."""

MAX_KEPT_BYTES = 256 << 20
"""Index memory that a plan keeps for later layers; beyond it the indices of the remaining chunks are rebuilt."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkScratch:
    """Uncleared memory of the compute type for one chunk, shared with all other chunks of the plan.

    queries: [n*K*M*G, D]. keys, values: [n*K*S, D]. pairs: [2*n*K*S, D], both of them.
    product, product_3d: [n*K*M*G, D] and [n*K, M*G, D].
    queries_3d, keys_t, values_3d: the same memory as [n*K, M*G, D], [n*K, D, S] and [n*K, S, D].
    scores, weights: [n*K, M*G, S]; scores_by_row: the scores as [n, K, M, G, S].
    shape_3d, strides_3d: of the product. width: D.
    """

    queries: torch.Tensor
    queries_3d: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pairs: torch.Tensor
    keys_t: torch.Tensor
    values_3d: torch.Tensor
    scores: torch.Tensor
    scores_by_row: torch.Tensor
    weights: torch.Tensor
    product: torch.Tensor
    product_3d: torch.Tensor
    shape_3d: tuple[int, int, int]
    strides_3d: tuple[int, int, int]
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """n work items of one shape.

    query_rows: [n*K*M*G], rows of D in qkv, or the range that they are.
    kv_rows: [n*K*S], rows of D in the key cache and in the value cache.
    pair_rows: [2*n*K*S], rows of D in the key cache's memory of keys and then of their values, where it has both and
        values are gathered; else None.
    bag_rows, bag_starts: [n*K*G*S] rows of values to sum for each head of single rows, and [n*K*G] where each sum's
        begin; None: values are gathered and multiplied.
    bias: [n*K, 1, S] of 0 or HIDDEN_SCORE, for items of one row; else None.
    hidden: [n, 1, M, 1, S] bool, slots that a row must not see; None when all are seen or ``bias`` says it.
    kept: [m] rows of the result that are not padding; None: all.
    target: [m] rows of D in out (when is_final), or in the partials, that the kept rows go to; a range when all are
        kept and go to consecutive rows.
    views: {field: (tensor, its rows)} of the layer before, whose activations mostly are the same tensors.
    """

    shape: ChunkShape
    scratch: ChunkScratch
    query_rows: Rows
    kv_rows: torch.Tensor
    pair_rows: torch.Tensor | None
    bag_rows: torch.Tensor | None
    bag_starts: torch.Tensor | None
    bias: torch.Tensor | None
    hidden: torch.Tensor | None
    kept: torch.Tensor | None
    target: Rows
    views: dict[str, tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=dict)

    def index_bytes(self) -> int:
        """Bytes of the tensors that belong to this chunk alone."""
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        memory = {tensor.data_ptr(): tensor.nbytes for tensor in fields if isinstance(tensor, torch.Tensor)}
        return sum(memory.values())


class ChunkedWork:
    """A work list cut into chunks for one geometry. Made once per plan, iterated once per layer.

    Args:
        work: the plan; its tensors are read now.
        geometry: heads and strides.

    Attributes:
        num_query_rows, num_cache_rows, num_out_rows: rows of D that qkv, each cache and out span.
    """

    def __init__(self, work: AttentionWork, geometry: Geometry) -> None:
        self.geometry = geometry
        self.num_query_rows = geometry.rows_of_tokens(work.num_tokens, geometry.token_stride)
        self.num_cache_rows = geometry.num_cache_rows
        self.num_out_rows = geometry.rows_of_tokens(work.num_tokens, geometry.out_stride)
        self._work = work
        self._device = work.block_table.device
        self._items = WorkItems(work)
        self._members = self._items.chunks(geometry)
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
        return self._work.reduce_rows[: self._work.num_reductions].long()

    @cached_property
    def owner_of_slot(self) -> torch.Tensor:
        """[P] int64: the reduction that each partial belongs to."""
        return self._to_device(slot_owners(self._work))

    def _allocate(self) -> dict[str, torch.Tensor]:
        """Flat memory for the largest chunk."""
        g = self.geometry
        shapes = [shape for shape, _ in self._members]
        queries = max(s.num_items * s.num_rows for s in shapes) * g.num_heads * g.head_dim
        keys = max(s.num_items * s.num_slots for s in shapes) * g.num_kv_heads * g.head_dim
        scores = max(s.num_items * s.num_rows * s.num_slots for s in shapes) * g.num_heads
        sizes = {
            "queries": queries,
            "pairs": 2 * keys,
            "scores": scores,
            "weights": scores,
            "product": queries,
        }
        return {name: torch.empty(size, dtype=g.dtype, device=self._device) for name, size in sizes.items()}

    def _scratch(self, shape: ChunkShape) -> ChunkScratch:
        g = self.geometry
        n, rows, slots = shape.num_items, shape.num_rows, shape.num_slots
        batch, group = n * g.num_kv_heads, g.group_size

        def memory(name: str, *dims: int) -> torch.Tensor:
            return self._memory[name][: math.prod(dims)].view(dims)

        pairs = memory("pairs", 2, batch, slots, g.head_dim)
        keys, values = pairs.unbind(0)
        scores = memory("scores", batch, rows * group, slots)
        queries = memory("queries", batch, rows * group, g.head_dim)
        product = memory("product", batch, rows * group, g.head_dim)
        return ChunkScratch(
            queries=queries.view(-1, g.head_dim),
            queries_3d=queries,
            keys=keys.view(-1, g.head_dim),
            values=values.view(-1, g.head_dim),
            pairs=pairs.view(-1, g.head_dim),
            keys_t=keys.transpose(1, 2),
            values_3d=values,
            scores=scores,
            scores_by_row=scores.view(n, g.num_kv_heads, rows, group, slots),
            weights=memory("weights", batch, rows * group, slots),
            product=product.view(-1, g.head_dim),
            product_3d=product,
            shape_3d=(batch, rows * group, g.head_dim),
            strides_3d=(rows * group * g.head_dim, g.head_dim, 1),
            width=g.head_dim,
        )

    def _build(self, shape: ChunkShape, items: Ints) -> Chunk:
        g = self.geometry
        tokens, positions, is_row = self._items.rows(items, shape.num_rows)
        if shape.is_final:
            target = self._by_head(tokens * (g.out_stride // g.head_dim))
        else:
            slots = self._items.partial_start[items, None] + np.arange(shape.num_rows)
            target = self._by_head(slots * g.num_heads)
        kept = None
        if not is_row.all():
            kept = np.flatnonzero(np.broadcast_to(is_row[:, None, :, None], target.shape))
        bias, hidden = self._mask(shape, items, positions)
        kv_rows = self._items.cache_rows(items, shape.num_slots, g)
        bag_rows = bag_starts = pair_rows = None
        if shape.num_rows == 1 and g.sums_in_bags:
            bag_rows = self._to_device(np.repeat(kv_rows, g.group_size, axis=1).reshape(-1))
            bag_starts = torch.arange(0, len(bag_rows), shape.num_slots, device=self._device)
        elif g.value_rows is not None:
            pair_rows = self._to_device(np.concatenate((kv_rows, kv_rows + g.value_rows)).reshape(-1))
        return Chunk(
            shape=shape,
            scratch=self._scratch(shape),
            query_rows=self._rows(self._by_head(tokens * (g.token_stride // g.head_dim))),
            kv_rows=self._to_device(kv_rows.reshape(-1)) if pair_rows is None else pair_rows[: kv_rows.size],
            pair_rows=pair_rows,
            bag_rows=bag_rows,
            bag_starts=bag_starts,
            bias=bias,
            hidden=hidden,
            kept=None if kept is None else self._to_device(kept),
            target=self._rows(target) if kept is None else self._to_device(target.reshape(-1)[kept]),
        )

    def _by_head(self, rows: Ints) -> Ints:
        """Rows [n, M] of each item's first head -> rows [n, K, M, G] of all heads."""
        g = self.geometry
        return rows[:, None, :, None] + np.arange(g.num_heads).reshape(1, g.num_kv_heads, 1, -1)

    def _mask(
        self, shape: ChunkShape, items: Ints, positions: Ints
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(bias, hidden) of a chunk."""
        if not shape.is_masked:
            return None, None
        hidden = self._items.hidden(items, shape.num_slots, positions)
        if shape.num_rows > 1:
            return None, self._to_device(hidden[:, None, :, None])
        bias = np.zeros(hidden.shape, dtype=np.float32)
        bias[hidden] = HIDDEN_SCORE
        by_head = np.repeat(bias, self.geometry.num_kv_heads, axis=0)
        return self._to_device(by_head).to(self.geometry.dtype), None

    def _rows(self, index: Ints) -> Rows:
        """Row numbers as a tensor, or as a slice where they are consecutive, which needs no copy."""
        flat = index.reshape(-1)
        first, last = int(flat[0]), int(flat[-1])
        if last - first == len(flat) - 1 and (flat[1:] - flat[:-1] == 1).all():
            return slice(first, last + 1)
        return self._to_device(flat)

    def _to_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
