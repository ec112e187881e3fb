"""GraphedModel: a model whose small forwards are CUDA graphs, captured between steps as sizes turn up.

A graph is captured for a number of tokens (a bucket); a step with fewer is padded: padding tokens are stored nowhere
(slot -1) and no plan reads them. Inputs live at fixed addresses, plans come from backends with ``PlanLimits``, so a
replay needs copies of a few kilobytes. Nothing is captured before the first token: a size runs eagerly the first time,
when its ops are recorded, and its graph is captured when it comes again, one at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch

from headrace.attention.base import AttentionBackend
from headrace.attention.metadata import AttentionMetadata, AttentionPlan, ForwardBatch, GroupBatch
from headrace.errors import CapacityError
from headrace.kernels.arena import Arena
from headrace.kernels.op_plan import OpPlan, record
from headrace.kernels.registry import Ops

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Numbers of tokens that graphs are captured for, up to the limit given."""


class EagerModel(Protocol):
    """A model that calls registered ops only, over buffers of ``arena``."""

    ops: Ops
    arena: Arena

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, E]."""

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] float32."""


class LimitedBackend:
    """Plans small steps into fixed buffers, for graphs, and larger ones into memory of their own.

    Args:
        fixed: a backend with ``PlanLimits`` of ``max_tokens`` tokens.
        exact: the same backend without limits.
    """

    def __init__(self, fixed: AttentionBackend, exact: AttentionBackend, max_tokens: int) -> None:
        self._fixed = fixed
        self._exact = exact
        self._max_tokens = max_tokens

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """See ``AttentionBackend.plan``."""
        if int(metadata.query_starts[-1]) > self._max_tokens:
            return self._exact.plan(metadata)
        try:
            return self._fixed.plan(metadata)
        except (
            CapacityError
        ):  # few tokens, but of contexts so long that the fixed buffers do not hold their splits
            return self._exact.plan(metadata)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor


class GraphedModel:
    """Stands in for a model in ``ModelRunner``; bitwise the same results as the padded eager forward.

    Args:
        model: the eager model, bound to its KV cache.
        max_tokens: the largest step that is captured; plans up to it come from fixed buffers.
        max_step_tokens: the largest step of all; buffers must not move once a graph knows them.
        max_num_seqs, max_blocks: size of the block tables.
        num_groups: KV groups.
        optimize: (a recorded forward, its number of tokens) -> a plan of fewer ops that gives the same.
    """

    def __init__(
        self,
        model: EagerModel,
        *,
        max_tokens: int,
        max_step_tokens: int,
        max_num_seqs: int,
        max_blocks: int,
        num_groups: int,
        device: torch.device,
        optimize: Callable[[OpPlan, int], OpPlan],
    ) -> None:
        self._model = model
        self._buckets = [size for size in BUCKETS if size <= max_tokens]
        longest = self._buckets[-1]
        self._input_ids = torch.zeros(longest, dtype=torch.int64, device=device)
        self._positions = torch.zeros(longest, dtype=torch.int64, device=device)
        self._slots = torch.full((num_groups, longest), -1, dtype=torch.int64, device=device)
        self._tables = torch.full(
            (num_groups, max_num_seqs, max_blocks), -1, dtype=torch.int32, device=device
        )
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._plans: dict[tuple[int, bool], OpPlan] = {}
        self._optimize = optimize
        self._pool: Any = None
        model.arena.reserve(max(max_step_tokens, longest))

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See the model."""
        return self._model.compute_logits(hidden, rows)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, E]; by a graph when this size has been captured, which happens when it comes again."""
        bucket = next((size for size in self._buckets if size >= batch.num_tokens), None)
        if bucket is None or not all(_is_fixed(group.plan) for group in batch.groups):
            return self._model.forward(batch)
        padded = self._pad(batch, bucket)
        key = (bucket, any(_has_long_tiles(group.plan) for group in padded.groups))
        if key not in self._plans:
            plan = self._plans[key] = self._optimize(record(self._model, padded), bucket)
            return plan.result.rows(bucket)[: batch.num_tokens]
        if key not in self._graphs:
            self._plans[key].replay(padded)  # kernels of an optimized plan compile here, not under capture
            self._graphs[key] = self._capture(self._plans[key], padded)
        captured = self._graphs[key]
        captured.graph.replay()
        return captured.hidden[: batch.num_tokens]

    def _pad(self, batch: ForwardBatch, bucket: int) -> ForwardBatch:
        """The batch at fixed addresses, with padding tokens up to the bucket."""
        count = batch.num_tokens
        self._input_ids[:count].copy_(batch.input_ids)
        self._positions[:count].copy_(batch.positions)
        groups = []
        for index, group in enumerate(batch.groups):
            slots, table = self._slots[index], self._tables[index]
            slots[:count].copy_(group.slot_mapping)
            slots[count:bucket].fill_(-1)
            source = group.plan.block_table
            table[: source.shape[0], : source.shape[1]].copy_(source)
            groups.append(GroupBatch(slots[:bucket], dataclasses.replace(group.plan, block_table=table)))
        return ForwardBatch(bucket, self._input_ids[:bucket], self._positions[:bucket], tuple(groups))

    def _capture(self, plan: OpPlan, padded: ForwardBatch) -> _Graph:
        """Capture a recorded forward; nothing runs until it is replayed."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = plan.replay(padded)
        self._pool = self._pool or graph.pool()
        return _Graph(graph, hidden)


def _is_fixed(plan: AttentionPlan) -> bool:
    """Whether the plan lies in the buffers that graphs read."""
    work = plan.derived.get("triton")
    return bool(work is not None and work.is_fixed)


def _has_long_tiles(plan: AttentionPlan) -> bool:
    work = plan.derived.get("triton")
    return bool(work is not None and work.num_long)
