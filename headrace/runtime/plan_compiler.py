"""PlanCompiler: the kernels of an optimized plan, compiled beside steps that go on without it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from headrace.kernels.op_plan import OpPlan

logger = logging.getLogger(__name__)


class PlanCompiler:
    """A large kernel compiles for seconds where the warm-up has not met its form: which weights are packed, and how,
    is known when they are loaded. One plan is compiled at a time; ops say by a method ``compile`` what can be.

    Args:
        in_background: else callers wait. Ranks do, which must take up a plan in the same step.
    """

    def __init__(self, in_background: bool) -> None:
        self._in_background = in_background
        self._begun: set[OpPlan] = set()
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is compiled now. Graphs are captured while no other thread loads kernels."""
        return self._thread is None or not self._thread.is_alive()

    def is_ready(self, plan: OpPlan) -> bool:
        """Whether a plan's kernels are compiled; begins with it if they are not."""
        if plan in self._begun:
            return self.is_idle
        calls = [call.op.compile for call in plan.calls if hasattr(call.op, "compile")]
        if not calls:
            return True
        if not self.is_idle:
            return False
        self._begun.add(plan)
        self._thread = threading.Thread(
            target=_compile_all, args=(calls,), name="headrace-compile", daemon=True
        )
        self._thread.start()
        if not self._in_background:
            self._thread.join()
        return self.is_idle


def _compile_all(calls: Sequence[Callable[[], object]]) -> None:
    try:
        for call in calls:
            call()
    except Exception:
        logger.warning("compiling ahead failed; the step that needs it will try again", exc_info=True)
