"""PlanCompiler: the kernels of an optimized plan, compiled beside steps that go on without it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from headrace.kernels.op_plan import OpPlan
from headrace.platforms.cuda import use_gpu

logger = logging.getLogger(__name__)


class PlanCompiler:
    """A large kernel compiles for seconds where the warm-up has not met its form: which weights are packed, and how,
    is known when they are loaded. One plan is compiled at a time; ops say by a method ``compile`` what can be.

    One outlives the plans that it was asked about: what still compiles for weights that were replaced keeps it busy.

    Args:
        device: of the kernels.
        in_background: else callers wait. Ranks do, which must take up a plan in the same step.
    """

    def __init__(self, device: torch.device, in_background: bool) -> None:
        self._device, self._in_background = device, in_background
        self._begun: weakref.WeakSet[OpPlan] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is compiled now. Graphs are captured while no other thread loads kernels."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Until nothing is compiled any more, and no weights are held for it."""
        if self._thread is not None:
            self._thread.join()

    def is_ready(self, plan: OpPlan) -> bool:
        """Whether a plan's kernels are compiled, or failed to be; begins with it if they are not."""
        if plan in self._begun:
            return self.is_idle
        calls = [call.op.compile for call in plan.calls if hasattr(call.op, "compile")]
        if not calls:
            return True
        if not self.is_idle:
            return False
        self._begun.add(plan)
        if not self._in_background:
            _compile_all(calls)
            return True
        self._thread = threading.Thread(
            target=self._compile_beside, args=(calls,), name="headrace-compile", daemon=True
        )
        self._thread.start()
        return self.is_idle

    def _compile_beside(self, calls: Sequence[Callable[[], object]]) -> None:
        if self._device.type == "cuda":
            use_gpu(self._device)
        _compile_all(calls)


def _compile_all(calls: Sequence[Callable[[], object]]) -> None:
    try:
        for call in calls:
            call()
    except Exception:
        logger.warning("compiling ahead failed; the step that needs it will try again", exc_info=True)
