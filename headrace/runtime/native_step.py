"""NativeStep: a model whose forward is one native call, recorded from its own forward at the first step."""

from __future__ import annotations

from typing import Protocol

import torch

from headrace.attention.metadata import ForwardBatch
from headrace.kernels.arena import Arena
from headrace.kernels.native.program import Program
from headrace.kernels.op_plan import record
from headrace.kernels.registry import Ops
from headrace.layers.sliced_logits import SlicedLogits


class RecordableModel(Protocol):
    """A model that calls registered ops only, over buffers of ``arena``."""

    ops: Ops
    arena: Arena

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, E]."""

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> SlicedLogits:
        """Logits of R rows."""


class NativeStep:
    """Stands in for a model in ``ModelRunner``; bitwise the same results.

    Args:
        model: the eager model, bound to its KV cache.
    """

    def __init__(self, model: RecordableModel) -> None:
        self._model = model
        self._program: Program | None = None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, E]."""
        if self._program is None:
            plan = record(self._model, batch)
            self._program = Program(plan, batch)
            return plan.result.rows(batch.num_tokens)
        return self._program.run(batch)

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> SlicedLogits:
        """See the model."""
        return self._model.compute_logits(hidden, rows)
