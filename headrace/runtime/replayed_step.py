"""ReplayedStep: a model whose forward is recorded at the first step and replayed from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from headrace.attention.metadata import ForwardBatch
from headrace.kernels.arena import Arena, Buffer
from headrace.kernels.op_plan import OpPlan, record
from headrace.kernels.registry import Ops
from headrace.layers.sliced_logits import SlicedLogits


class RecordableModel(Protocol):
    """A model that calls registered ops only, over buffers of ``arena``."""

    ops: Ops
    arena: Arena

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, E]."""

    @property
    def head_buffers(self) -> tuple[Buffer, Buffer]:
        """What ``compute_logits`` writes."""

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> SlicedLogits:
        """Logits of R rows."""


class ReplayedStep:
    """Stands in for a model in ``ModelRunner``; bitwise the same results. A replay calls the ops one after another,
    without the layers' Python around them.

    Args:
        model: the eager model, bound to its KV cache.
    """

    def __init__(self, model: RecordableModel) -> None:
        self._model = model
        self._run: Callable[[ForwardBatch], torch.Tensor] | None = None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, E]."""
        if self._run is None:
            plan = record(self._model, batch)
            self._run = self._prepare(plan, batch)
            return plan.result.rows(batch.num_tokens)
        return self._run(batch)

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> SlicedLogits:
        """See the model."""
        return self._model.compute_logits(hidden, rows)

    def _prepare(self, plan: OpPlan, batch: ForwardBatch) -> Callable[[ForwardBatch], torch.Tensor]:
        """What runs the plan over later batches; ``batch`` is the recorded one."""
        return plan.replay
