"""fuse_reductions: a recorded forward whose sums over ranks take the residual and the norm after them along."""

from __future__ import annotations

from headrace.kernels.op_plan import OpCall, OpPlan, Symbol
from headrace.kernels.registry import Op


def fuse_reductions(plan: OpPlan, all_reduce_add_norm: Op) -> OpPlan:
    """``all_reduce(x)``, ``add_rms_norm(x, residual, weight, eps, x)`` become one call, which gives the same.

    all_reduce_add_norm: takes what ``add_rms_norm`` takes.
    """
    calls: list[OpCall] = []
    index = 0
    while index < len(plan.calls):
        call = plan.calls[index]
        following = plan.calls[index + 1] if index + 1 < len(plan.calls) else None
        if following is not None and _belong_together(call, following):
            args = following.args
            symbols = tuple((place, arg.index) for place, arg in enumerate(args) if isinstance(arg, Symbol))
            call = OpCall("all_reduce_add_norm", all_reduce_add_norm, args, symbols)
            index += 1
        calls.append(call)
        index += 1
    return OpPlan(calls, plan.buffers, plan.result)


def _belong_together(first: OpCall, second: OpCall) -> bool:
    """The sum is read by the norm alone, which writes over it."""
    if first.name != "all_reduce" or second.name != "add_rms_norm":
        return False
    x, out = second.args[0], second.args[4]
    return isinstance(x, Symbol) and first.args[0] == x == out
