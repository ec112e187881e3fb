"""Which thread compiles an optimized plan's kernels, for which GPU, and what waits for it."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from headrace.kernels.op_plan import OpCall, OpPlan
from headrace.runtime import plan_compiler
from headrace.runtime.plan_compiler import PlanCompiler

CPU = torch.device("cpu")


class Compiled:
    """An op that notes which thread compiles it."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.may_end, self.thread, self._failure = threading.Event(), threading.current_thread(), failure

    def compile(self) -> None:
        self.thread = threading.current_thread()
        assert self.may_end.wait(60)
        if self._failure is not None:
            raise self._failure

    def __call__(self) -> None:
        """Nothing."""


def plan_of(op: Any) -> OpPlan:
    return OpPlan([OpCall("op", op, (), ())], [], None)  # type: ignore[arg-type]


def test_a_gpu_that_is_not_the_first_is_the_threads_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[threading.Thread, torch.device]] = []
    monkeypatch.setattr(
        plan_compiler, "use_gpu", lambda device: chosen.append((threading.current_thread(), device))
    )
    op, device = Compiled(), torch.device("cuda", 1)
    compiler = PlanCompiler(device, in_background=True)
    plan = plan_of(op)
    assert not compiler.is_ready(plan) and not compiler.is_idle
    op.may_end.set()
    compiler.wait()
    assert compiler.is_ready(plan) and chosen == [(op.thread, device)]
    assert op.thread is not threading.current_thread()


@pytest.mark.parametrize("failure", [None, RuntimeError("no")])
def test_ranks_compile_in_the_step(failure: Exception | None) -> None:
    """Whose thread has its GPU already. A failure is left to the step that runs the kernel."""
    op = Compiled(failure)
    op.may_end.set()
    compiler = PlanCompiler(CPU, in_background=False)
    assert compiler.is_ready(plan_of(op)) and compiler.is_idle
    assert op.thread is threading.current_thread()


def test_plans_of_replaced_weights_are_not_kept() -> None:
    op = Compiled()
    plan = plan_of(op)
    compiler, kept = PlanCompiler(CPU, in_background=True), weakref.ref(op)
    compiler.is_ready(plan)
    other = plan_of(Compiled())
    assert not compiler.is_ready(other), "one plan at a time, whosever it is"
    op.may_end.set()
    del op, plan
    compiler.wait()
    gc.collect()
    assert kept() is None
