"""Chunks: work items of one shape that the reference attention op computes at once, with indices and scratch memory.

Legend: n items of a chunk, H query heads, K KV heads, G = H / K, M padded query rows, S padded KV slots, D head dim,
P partials.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.reference.attention_items import (
    AttentionWork,
    Bools,
    ChunkShape,
    Geometry,
    Ints,
    WorkItems,
    slot_owners,
)

HIDDEN_SCORE = -1e30
"""Score of a key that a row must not see. Finite, so that a row that sees no key of an item yields a partial of
weight zero instead of NaN; any true score is above it, and exp(HIDDEN_SCORE - score) is zero."""

MAX_KEPT_BYTES = 256 << 20
"""Index memory that a plan keeps for later layers; beyond it the indices of the remaining chunks are rebuilt."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkScratch:
    """Uncleared memory, mostly of the compute type, for one chunk, shared with all other chunks of the plan.

    queries: [n*K*M*G, D]. keys, values: [n*K*S, D]. pairs: [2*n*K*S, D], both of them.
    product, product_3d: [n*K*M*G, D] and [n*K, M*G, D].
    queries_3d, keys_t, values_3d: the same memory as [n*K, M*G, D], [n*K, D, S] and [n*K, S, D].
    stored: [2*n*K*S, D] of the caches' type, for pairs before they are widened; None: they need not be.
    scores, weights: [n*K, M*G, S]; scores_by_row: the scores as [n, K, M, G, S].
    """

    queries: torch.Tensor
    queries_3d: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pairs: torch.Tensor
    stored: torch.Tensor | None
    keys_t: torch.Tensor
    values_3d: torch.Tensor
    scores: torch.Tensor
    scores_by_row: torch.Tensor
    weights: torch.Tensor
    product: torch.Tensor
    product_3d: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Where a chunk's results go.

    view: the place itself, where all results go to consecutive rows; else None.
    rows: the whole tensor as rows.
    index: [m] its rows to write.
    kept: [m] results that are not padding; None: all.
    """

    view: torch.Tensor | None
    rows: torch.Tensor
    index: torch.Tensor | None
    kept: torch.Tensor | None

    def put(self, values: torch.Tensor) -> None:
        """Store results [.., w]."""
        if self.view is not None:
            self.view.copy_(values)
            return
        assert self.index is not None
        if self.kept is not None:
            values = values[self.kept]
        self.rows.index_copy_(0, self.index, values.to(self.rows.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """n work items of one shape.

    queries: [n*K, M*G, D] view of them, where they lie in consecutive rows; else None.
    query_rows: [n*K*M*G], rows of D in qkv to gather; None where there is a view.
    kv_rows: [n*K*S], rows of D in the key cache and in the value cache.
    pair_rows: [2*n*K*S], rows of D in the key cache's memory of keys and then of their values, where it has both and
        values are gathered; else None.
    bag_rows, bag_starts: [n*K*G*S] rows of values to sum for each head of single rows, and [n*K*G] where each sum's
        begin; None: values are gathered and multiplied.
    bias: [n*K, 1, S] of 0 or HIDDEN_SCORE, for items of one row; else None.
    hidden: [n, 1, M, 1, S] bool, slots that a row must not see; None when all are seen or ``bias`` says it.
    target: rows of D in out (when is_final), or in the partials.
    log_target: rows of the partials' log-sum-exps; None when is_final.
    """

    shape: ChunkShape
    scratch: ChunkScratch
    queries: torch.Tensor | None
    query_rows: torch.Tensor | None
    kv_rows: torch.Tensor
    pair_rows: torch.Tensor | None
    bag_rows: torch.Tensor | None
    bag_starts: torch.Tensor | None
    bias: torch.Tensor | None
    hidden: torch.Tensor | None
    target: Target
    log_target: Target | None

    def index_bytes(self) -> int:
        """Bytes of the tensors that belong to this chunk alone."""
        indices = [self.query_rows, self.kv_rows if self.pair_rows is None else self.pair_rows]
        indices += [
            self.bag_rows,
            self.bag_starts,
            self.bias,
            self.hidden,
            self.target.index,
            self.target.kept,
        ]
        return sum(tensor.nbytes for tensor in indices if tensor is not None)


class ChunkedWork:
    """A work list cut into chunks for one geometry, over one qkv and out, which layers share. Made once per plan,
    iterated once per layer. Does not keep the plan, which keeps it: scratch memory is free as soon as the step ends.

    Args:
        work: the plan; its tensors are read now.
        geometry: heads and strides.
        qkv, out: as ``attention`` takes them.

    Attributes:
        query_rows, out_rows: qkv and out as rows of D, up to the last one that is used.
        num_cache_rows: rows of D that each cache spans.
        num_pair_rows: rows of D from the first key to the last value, where both caches are one memory.
        partials: [P*H, D], outputs of the plan's partials. log_sums: [P*H, 1], their log-sum-exps.
        merged_tokens: [reductions] int64, the token that each reduction writes.
        owner_of_slot: [P] int64, the reduction that each partial belongs to.
    """

    def __init__(self, work: AttentionWork, geometry: Geometry, qkv: torch.Tensor, out: torch.Tensor) -> None:
        self.geometry = geometry
        self.query_rows, self.out_rows = (
            tensor_rows(tensor, geometry.rows_of_tokens(work.num_tokens, tensor.stride(0)), geometry.head_dim)
            for tensor in (qkv, out)
        )
        self.num_cache_rows = geometry.num_cache_rows
        self.num_pair_rows = self.num_cache_rows + (geometry.value_rows or 0)
        self._activations = (qkv, out)  # work is found again by their ids
        self._strides = (qkv.stride(0), out.stride(0))
        self._device = work.block_table.device
        self.partials = torch.empty(
            (work.num_partials * geometry.num_heads, geometry.head_dim),
            dtype=geometry.dtype,
            device=self._device,
        )
        self.log_sums = self.partials.new_empty((len(self.partials), 1))
        if work.num_reductions:
            self.merged_tokens = work.reduce_rows[: work.num_reductions].long()
            self.owner_of_slot = self._to_device(slot_owners(work))
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
        memory = {name: torch.empty(size, dtype=g.dtype, device=self._device) for name, size in sizes.items()}
        if g.cache_dtype != g.dtype:
            memory["stored"] = torch.empty(2 * keys, dtype=g.cache_dtype, device=self._device)
        return memory

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
            stored=memory("stored", 2 * batch * slots, g.head_dim) if "stored" in self._memory else None,
            keys_t=keys.transpose(1, 2),
            values_3d=values,
            scores=scores,
            scores_by_row=scores.view(n, g.num_kv_heads, rows, group, slots),
            weights=memory("weights", batch, rows * group, slots),
            product=product.view(-1, g.head_dim),
            product_3d=product,
        )

    def _build(self, shape: ChunkShape, items: Ints) -> Chunk:
        g = self.geometry
        tokens, positions, is_row = self._items.rows(items, shape.num_rows)
        bias, hidden = self._mask(shape, items, positions)
        kv_rows = self._items.cache_rows(items, shape.num_slots, g)
        bag_rows = bag_starts = pair_rows = None
        if shape.num_rows == 1 and g.sums_in_bags:
            bag_rows = self._to_device(np.repeat(kv_rows, g.group_size, axis=1).reshape(-1))
            bag_starts = torch.arange(0, len(bag_rows), shape.num_slots, device=self._device)
        elif g.value_rows is not None:
            pair_rows = self._to_device(np.concatenate((kv_rows, kv_rows + g.value_rows)).reshape(-1))
        scratch = self._scratch(shape)
        query_rows = self._by_head(tokens * (self._strides[0] // g.head_dim))
        queries = _consecutive(self.query_rows, query_rows, scratch.queries_3d)
        target, log_target = self._targets(shape, items, tokens, is_row, scratch)
        return Chunk(
            shape=shape,
            scratch=scratch,
            queries=queries,
            query_rows=None if queries is not None else self._to_device(query_rows.reshape(-1)),
            kv_rows=self._to_device(kv_rows.reshape(-1)) if pair_rows is None else pair_rows[: kv_rows.size],
            pair_rows=pair_rows,
            bag_rows=bag_rows,
            bag_starts=bag_starts,
            bias=bias,
            hidden=hidden,
            target=target,
            log_target=log_target,
        )

    def _targets(
        self, shape: ChunkShape, items: Ints, tokens: Ints, is_row: Bools, scratch: ChunkScratch
    ) -> tuple[Target, Target | None]:
        """Where outputs go, and where their log-sum-exps."""
        if shape.is_final:
            rows = self._by_head(tokens * (self._strides[1] // self.geometry.head_dim))
        else:
            slots = self._items.partial_start[items, None] + np.arange(shape.num_rows)
            rows = self._by_head(slots * self.geometry.num_heads)
        kept = None
        if not is_row.all():
            kept = np.flatnonzero(np.broadcast_to(is_row[:, None, :, None], rows.shape))
        index = self._to_device(rows.reshape(-1) if kept is None else rows.reshape(-1)[kept])
        kept_rows = None if kept is None else self._to_device(kept)

        def target(tensor: torch.Tensor, values: torch.Tensor) -> Target:
            view = _consecutive(tensor, rows, values) if kept is None else None
            return Target(view, tensor, index, kept_rows)

        if shape.is_final:
            return target(self.out_rows, scratch.product), None
        sums = scratch.product.new_empty((len(scratch.product), 1))
        return target(self.partials, scratch.product), target(self.log_sums, sums)

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

    def _to_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def tensor_rows(tensor: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
    """The memory of ``tensor`` as rows of ``width`` elements, of which it spans ``num_rows``."""
    return tensor.as_strided((num_rows, width), (width, 1))


def _consecutive(rows: torch.Tensor, index: Ints, like: torch.Tensor) -> torch.Tensor | None:
    """The rows [.., w] of these numbers as a view of the shape of ``like``; None where they are not consecutive."""
    flat = index.reshape(-1)
    first, last = int(flat[0]), int(flat[-1])
    if last - first != len(flat) - 1 or (flat[1:] - flat[:-1] != 1).any():
        return None
    return rows[first : last + 1].view(like.shape)
