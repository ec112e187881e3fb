"""NativeStep: a model whose forward is one native call, recorded from its own forward at the first step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.attention.metadata import ForwardBatch
from headrace.kernels.native.head_program import HeadProgram
from headrace.kernels.native.program import Program
from headrace.kernels.op_plan import OpPlan
from headrace.runtime.replayed_step import RecordableModel, ReplayedStep


class NativeStep(ReplayedStep):
    """Compiles the recorded calls to a ``Program``, and the head's to a ``HeadProgram``."""

    def __init__(self, model: RecordableModel) -> None:
        super().__init__(model)
        self._head: HeadProgram | None = None
        self._has_head = True

    def best_tokens(
        self, hidden: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """([R] float32, [R] int64): each row's largest logit and its token, without the logits; None: it takes them."""
        if self._head is None and self._has_head:
            self._head = HeadProgram.record(self._model, hidden, rows)
            self._has_head = self._head is not None
        return None if self._head is None else self._head.run(hidden, rows)

    def _prepare(self, plan: OpPlan, batch: ForwardBatch) -> Callable[[ForwardBatch], torch.Tensor]:
        return Program(plan, batch).run
