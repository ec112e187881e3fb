"""How the reference attention op batches work items: chunks of items of one shape, with their gather indices.

Items are sorted by shape class: query rows rounded up to a power of two, KV slots rounded up to a multiple that
grows with the length. An item's class depends on the item alone, and every item of a chunk is computed as its own
matrix product of the class's size, so results do not depend on what else is in the chunk.

Legend: n items of a chunk, H query heads, K KV heads, G = H / K, M padded query rows, S padded KV slots, D head dim.
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
    """What chunks depend on besides the work list.

    token_stride, out_stride: between tokens of qkv and of out, in rows of D elements.
    cache_strides: of the KV cache [num_blocks, K, B, D], in elements; the first three are multiples of D.
    value_offset: rows of D from a key to its value; None when they lie in different tensors.
    dtype: of scores and sums.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    token_stride: int
    out_stride: int
    cache_strides: tuple[int, ...]
    value_offset: int | None
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """n work items of one shape.

    query_rows: [n*K*M*G], rows of qkv, or the range that they are.
    kv_rows: [n*K*S] rows of the key cache; keys first and then values, [2*n*K*S], with a value offset.
    bias: [n*K, 1, S] of 0 or HIDDEN_SCORE, for items of one row; else None.
    hidden: [n, 1, M, 1, S] bool, keys that a row must not see; None when all are seen or ``bias`` says it.
    is_final: results are output rows; else they are partials.
    kept: [m] rows of the result that are not padding; None: all.
    target: rows of the output, or of the partials, that the kept rows go to.
    """

    num_items: int
    num_rows: int
    num_slots: int
    query_rows: Rows
    kv_rows: torch.Tensor
    bias: torch.Tensor | None
    hidden: torch.Tensor | None
    is_final: bool
    kept: torch.Tensor | None
    target: Rows

    def index_bytes(self) -> int:
        """Bytes of the tensors above."""
        tensors = (self.query_rows, self.kv_rows, self.bias, self.hidden, self.kept, self.target)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


class ChunkedWork:
    """A work list cut into chunks for one cache geometry. Made once per plan, iterated once per layer.

    Args:
        work: the plan; its tensors are read now and on first use of each chunk.
        geometry: heads and strides.
    """

    def __init__(self, work: AttentionWork, geometry: Geometry) -> None:
        self.geometry = geometry
        self._work = work
        count = work.num_items
        self._num_rows = _host(work.item_num_rows, count)
        self._row_start = _host(work.item_row_start, count)
        self._kv_start = _host(work.item_kv_start, count)
        self._kv_end = _host(work.item_kv_end, count)
        self._partial_start = _host(work.item_partial_start, count)
        self._request = _host(work.item_request, count)
        self._tokens = _host(work.query_rows, work.num_rows)
        self._positions = _host(work.row_positions, work.num_rows)
        self._members = self._classify()
        self._kept: list[Chunk | None] = [None] * len(self._members)
        self._kept_bytes = 0
        self._scratch: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def __iter__(self) -> Iterator[Chunk]:
        for index, (members, num_rows, num_slots, is_masked) in enumerate(self._members):
            chunk = self._kept[index]
            if chunk is None:
                chunk = self._build(members, num_rows, num_slots, is_masked)
                self._kept_bytes += chunk.index_bytes()
                if self._kept_bytes <= MAX_KEPT_BYTES:
                    self._kept[index] = chunk
            yield chunk

    @cached_property
    def merged_tokens(self) -> torch.Tensor:
        """[reductions] int64: the token that each reduction writes."""
        return self._to_device(_host(self._work.reduce_rows, self._work.num_reductions))

    @cached_property
    def owner_of_slot(self) -> torch.Tensor:
        """[P] int64: the reduction that each partial slot belongs to."""
        work = self._work
        sizes = np.diff(_host(work.reduce_starts, work.num_reductions + 1))
        owners = np.empty(work.num_partials, dtype=np.int64)
        owners[_host(work.reduce_slots, work.num_partials)] = np.repeat(np.arange(len(sizes)), sizes)
        return self._to_device(owners)

    def scratch(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Uncleared memory in the compute type, the same for every use of ``name``."""
        view = self._views.get((name, shape))
        if view is None:
            size = math.prod(shape)
            buffer = self._scratch.get(name)
            if buffer is None or len(buffer) < size:
                device = self._work.block_table.device
                buffer = self._scratch[name] = torch.empty(size, dtype=self.geometry.dtype, device=device)
                self._views = {key: kept for key, kept in self._views.items() if key[0] != name}
            view = self._views[name, shape] = buffer[:size].view(shape)
        return view

    def _classify(self) -> list[tuple[Ints, int, int, bool]]:
        """Items by class and cut into chunks of bounded scratch memory: (items, M, S, is masked)."""
        rows = 1 << np.ceil(np.log2(self._num_rows)).astype(np.int64)
        slots = _round_slots(self._kv_end - self._kv_start)
        # single rows are always masked (their bias is free); others only where some row misses some key
        is_masked = (rows == 1) | (slots != self._kv_end - self._kv_start) | self._hides_keys()
        is_partial = self._partial_start >= 0
        key = ((rows * (int(slots.max(initial=0)) + 1) + slots) * 2 + is_masked) * 2 + is_partial
        order = np.argsort(key, kind="stable")
        bounds = np.flatnonzero(np.diff(key[order], prepend=-1, append=-1))
        members: list[tuple[Ints, int, int, bool]] = []
        for start, stop in pairwise(bounds):
            first = order[start]
            shape = int(rows[first]), int(slots[first])
            step = max(1, MAX_CHUNK_BYTES // self._item_bytes(*shape))
            members += [
                (order[at : min(at + step, stop)], *shape, bool(is_masked[first]))
                for at in range(start, stop, step)
            ]
        return members

    def _hides_keys(self) -> npt.NDArray[np.bool_]:
        """[I]: whether some row of the item must not see some key of its range."""
        if not len(self._num_rows):
            return np.zeros(0, dtype=bool)
        bounds = np.stack((self._row_start, self._row_start + self._num_rows), axis=1).ravel()
        padded = np.append(self._positions, self._positions[-1:])
        hides = np.minimum.reduceat(padded, bounds)[::2] < self._kv_end - 1
        if self._work.window is not None:
            hides |= np.maximum.reduceat(padded, bounds)[::2] - self._work.window >= self._kv_start
        return hides

    def _item_bytes(self, num_rows: int, num_slots: int) -> int:
        g = self.geometry
        query_rows = num_rows * g.num_heads
        return 4 * (2 * num_slots * g.num_kv_heads * g.head_dim + 2 * query_rows * (num_slots + g.head_dim))

    def _build(self, items: Ints, num_rows: int, num_slots: int, is_masked: bool) -> Chunk:
        g = self.geometry
        row = np.minimum(np.arange(num_rows), self._num_rows[items, None] - 1) + self._row_start[items, None]
        tokens = self._tokens[row]  # [n, M]; rows of padding repeat the item's last
        group = g.num_heads // g.num_kv_heads
        heads = np.arange(g.num_heads).reshape(1, g.num_kv_heads, 1, group)
        is_final = bool(self._partial_start[items[0]] < 0)
        if is_final:
            target = tokens[:, None, :, None] * g.out_stride + heads
        else:
            slot = self._partial_start[items, None] + np.arange(num_rows)
            target = slot[:, None, :, None] * g.num_heads + heads
        kept = None
        if (self._num_rows[items] != num_rows).any():
            is_kept = np.arange(num_rows) < self._num_rows[items, None]
            kept = np.flatnonzero(np.broadcast_to(is_kept[:, None, :, None], target.shape))
            target = target.reshape(-1)[kept]
        kv_rows, hidden = self._keys(items, num_slots, self._positions[row] if is_masked else None)
        bias = None
        if num_rows == 1 and hidden is not None:
            bias = torch.where(hidden, HIDDEN_SCORE, 0.0).to(g.dtype)
            bias = bias.view(-1, 1, 1, num_slots).expand(-1, g.num_kv_heads, 1, num_slots)
            bias = bias.reshape(-1, 1, num_slots)
        return Chunk(
            num_items=len(items),
            num_rows=num_rows,
            num_slots=num_slots,
            query_rows=self._rows(tokens[:, None, :, None] * g.token_stride + heads),
            kv_rows=kv_rows,
            bias=bias,
            hidden=None if bias is not None else hidden,
            is_final=is_final,
            kept=None if kept is None else self._to_device(kept),
            target=self._rows(target),
        )

    def _keys(
        self, items: Ints, num_slots: int, positions: Ints | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cache rows of the items' keys, and with the rows' positions [n, M] which keys are hidden from them.

        Slots of padding repeat the item's last key, so that nothing outside the item's range is ever read.
        """
        g, work = self.geometry, self._work
        device = work.block_table.device
        start = self._to_device(self._kv_start[items])[:, None]
        end = self._to_device(self._kv_end[items])[:, None]
        key = start + torch.arange(num_slots, device=device)
        read = torch.minimum(key, end - 1)
        table = work.block_table[self._to_device(self._request[items])]
        block = table.gather(1, read // work.block_size).long()
        block_stride, head_stride, slot_stride = (stride // g.head_dim for stride in g.cache_strides[:3])
        base = block * block_stride + read % work.block_size * slot_stride
        head = torch.arange(g.num_kv_heads, device=device)[:, None] * head_stride
        rows = base[:, None] + head  # [n, K, S]
        if g.value_offset is not None:
            rows = torch.stack((rows, rows + g.value_offset))
        if positions is None:
            return rows.view(-1), None
        seen_by = self._to_device(positions)[:, :, None]
        key, end = key[:, None], end[:, None]
        hidden = (key > seen_by) | (key >= end)
        if work.window is not None:
            hidden |= key <= seen_by - work.window
        return rows.view(-1), hidden[:, None, :, None]

    def _rows(self, index: Ints) -> Rows:
        """Row numbers as a tensor, or as a slice where they are consecutive, which needs no copy."""
        flat = index.reshape(-1)
        first = int(flat[0])
        if flat[-1] - first == len(flat) - 1 and (np.diff(flat) == 1).all():
            return slice(first, first + len(flat))
        return self._to_device(flat)

    def _to_device(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self._work.block_table.device)


def _host(tensor: torch.Tensor, length: int) -> Ints:
    return tensor[:length].cpu().numpy().astype(np.int64)


def _round_slots(lengths: Ints) -> Ints:
    """Lengths rounded up to a multiple of 16, or of an eighth to a quarter of the length where that is more."""
    unit = np.maximum(16, 1 << np.floor(np.log2(np.maximum(lengths, 1)) - 2).astype(np.int64))
    return -(-lengths // unit) * unit
