"""NativeStep: a model whose forward is one native call, recorded from its own forward at the first step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.attention.metadata import ForwardBatch
from headrace.kernels.native.program import Program
from headrace.kernels.op_plan import OpPlan
from headrace.runtime.replayed_step import ReplayedStep


class NativeStep(ReplayedStep):
    """Compiles the recorded calls to a ``Program``."""

    def _prepare(self, plan: OpPlan, batch: ForwardBatch) -> Callable[[ForwardBatch], torch.Tensor]:
        return Program(plan, batch).run
