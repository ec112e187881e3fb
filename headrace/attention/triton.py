"""TritonBackend: plans for the Triton attention op, in one upload a step."""

from __future__ import annotations

import numpy as np
import torch

from headrace.attention.base import AttentionShape, PlanLimits
from headrace.attention.metadata import AttentionMetadata, AttentionPlan
from headrace.attention.ring_split import RingSplitRule
from headrace.attention.triton_work_list import SplitRule, TritonWorkList, build_triton_work_list
from headrace.core.kv_cache_spec import MAX_LEVELS
from headrace.errors import CapacityError
from headrace.kernels.triton import attention_work as layout
from headrace.kernels.triton.attention import WORK_KEY
from headrace.kernels.triton.attention_hopper_tiles import suits_hopper
from headrace.kernels.triton.attention_ring_tiles import suits_ring
from headrace.kernels.triton.attention_work import PackedWork, Scratch, TileRows
from headrace.kernels.triton.launch import HOPPER_MULTIPROCESSORS

_MAX_SCRATCH_BYTES = 256 << 20


class TritonBackend:
    """See ``AttentionBackend``.

    With ``PlanLimits`` one device buffer holds every step's work, and partials have one scratch, of at most 256 MiB.
    A step that needs more is refused; a backend without limits can plan it.

    A CUDA graph that was captured over a plan of decodes only can be replayed for such plans; one that was captured
    over a plan with longer tiles, for all. Which launch of short tiles it holds is a matter of speed and rounding only.
    """

    def __init__(self, shape: AttentionShape, device: torch.device, limits: PlanLimits | None = None) -> None:
        self._device = device
        self._rows = TileRows.for_group(shape.num_heads // shape.num_kv_heads)
        self._split = _split_rule(shape)
        self._buffer: torch.Tensor | None = None
        self._scratch: dict[tuple[int, int], Scratch] = {}
        self._max_partial_rows = 0
        self._header = b""  # of the last plan in the buffer, and its tensors
        self._views: dict[str, torch.Tensor] = {}
        if limits is not None:
            row_bytes = shape.num_heads * (shape.head_dim + 1) * 4
            most = (1 + MAX_LEVELS) * self._split.max_splits * limits.max_tokens
            self._max_partial_rows = min(most, _MAX_SCRATCH_BYTES // row_bytes)
            self._buffer = torch.zeros(self._buffer_size(limits), dtype=torch.int32, device=device)

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        return self._upload(metadata, build_triton_work_list(metadata, self._rows, self._split))

    def _upload(self, metadata: AttentionMetadata, work: TritonWorkList) -> AttentionPlan:
        num_partials = work.length("reduce_slots")
        size = layout.packed_size(
            work.length("query_rows"), work.length("item_request"), work.length("reduce_rows"), num_partials
        )
        if self._buffer is not None:
            self._check_capacity(size, num_partials)
        # torch keeps pinned memory from being reused until copies from it are done
        host = torch.empty(size, dtype=torch.int32, pin_memory=self._device.type == "cuda", device="cpu")
        layout.pack(work.arrays, work.num_short, host.numpy())
        if self._buffer is not None:
            self._buffer[:size].copy_(host, non_blocking=True)
            packed = self._pack(work, self._buffer, self._max_partial_rows, self._scratch)
        else:
            packed = self._pack(work, host.to(self._device, non_blocking=True), num_partials, {})
        return self._plan(metadata, packed, host.numpy()[: layout.REDUCE_SLOTS_AT + 1])

    def _plan(self, metadata: AttentionMetadata, packed: PackedWork, header: np.ndarray) -> AttentionPlan:
        """The plan whose tensors are views of the buffer that begins with ``header``."""
        if self._buffer is None:
            views = _views(packed.buffer, header.tolist())
        else:
            said = header.tobytes()
            if said != self._header:
                self._header, self._views = said, _views(packed.buffer, header.tolist())
            views = self._views
        num_items, num_rows, num_partials, num_reductions = header[:4].tolist()
        return AttentionPlan(
            block_size=metadata.block_size,
            window=metadata.window,
            block_table=metadata.block_table,
            num_tokens=int(metadata.query_starts[-1]),
            num_items=num_items,
            num_rows=num_rows,
            num_partials=num_partials,
            num_reductions=num_reductions,
            derived={WORK_KEY: packed},
            **views,
        )

    def _pack(
        self,
        work: TritonWorkList,
        buffer: torch.Tensor,
        num_partial_rows: int,
        scratch: dict[tuple[int, int], Scratch],
    ) -> PackedWork:
        return PackedWork(
            buffer=buffer,
            num_short=work.num_short,
            num_long=work.length("item_request") - work.num_short,
            num_reductions=work.length("reduce_rows"),
            num_partial_rows=num_partial_rows,
            is_fixed=self._buffer is not None,
            scratch=scratch,
        )

    def _buffer_size(self, limits: PlanLimits) -> int:
        """Length of the buffer in the worst step within ``limits``, shared prefixes included."""
        tokens, requests = limits.max_tokens, min(limits.max_requests, limits.max_tokens)
        tiles = requests + MAX_LEVELS * (requests // 2) + (1 + MAX_LEVELS) * (tokens // self._rows.long)
        # a range that begins inside a split touches one more
        num_items = tiles * (self._split.max_splits + 1)
        return layout.packed_size((1 + MAX_LEVELS) * tokens, num_items, tokens, self._max_partial_rows)

    def _check_capacity(self, size: int, num_partials: int) -> None:
        assert self._buffer is not None
        for name, needed, held in (
            ("numbers in its work list", size, len(self._buffer)),
            ("rows of partial results", num_partials, self._max_partial_rows),
        ):
            if needed > held:
                raise CapacityError(
                    f"an attention plan needs {needed} {name}, but its buffers hold {held}; "
                    "raise PlanLimits or schedule fewer tokens in one step"
                )


def _split_rule(shape: AttentionShape) -> SplitRule:
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    if shape.is_coded and suits_ring(*heads):
        return RingSplitRule(shape.num_kv_heads)
    if shape.is_half and suits_hopper(*heads):  # whose programs have a multiprocessor each
        return SplitRule(shape.num_kv_heads, num_units=HOPPER_MULTIPROCESSORS)
    return SplitRule(shape.num_kv_heads)


def _views(buffer: torch.Tensor, header: list[int]) -> dict[str, torch.Tensor]:
    """A plan's tensors, by name."""
    num_items, num_rows, num_partials, num_reductions, _ = header[:5]
    rows_at, items_at, reduce_at, starts_at, slots_at = header[5:10]
    rows = buffer.as_strided((2, num_rows), (1, 2), rows_at)
    items = buffer.as_strided((layout.ITEM_SIZE, num_items), (1, layout.ITEM_SIZE), items_at)
    return {
        "reduce_rows": buffer[reduce_at : reduce_at + num_reductions],
        "reduce_starts": buffer[starts_at : starts_at + num_reductions + 1],
        "reduce_slots": buffer[slots_at : slots_at + num_partials],
        **dict(zip(layout.ROW_FIELDS, rows, strict=True)),
        **dict(zip(layout.ITEM_FIELDS, items[: len(layout.ITEM_FIELDS)], strict=True)),
    }
