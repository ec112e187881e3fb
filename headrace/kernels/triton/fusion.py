"""fuse: a recorded forward of one token with neighbouring ops put into one where nothing else reads what links them.

A decoder layer's ten launches become seven. The model knows nothing of it: only the flat list of calls of its
``OpPlan`` is rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.kernels.op_plan import OpCall, OpPlan, Symbol
from headrace.kernels.triton.fused import can_fuse, gated_linear, linear_add, norm_gated_linear, norm_linear
from headrace.kernels.triton.norm import rms_norm
from headrace.kernels.triton.rank_exchange import RankExchange
from headrace.kernels.triton.stack_layers import stack_layers

_OUTPUT_PLACES = {"embedding": 2, "rms_norm": 3, "add_rms_norm": 4, "gated_act": 2, "gated_linear": 4}
"""Where ops that overwrite all of a buffer have it among their arguments."""

Rule = Callable[[OpCall, OpCall], "list[OpCall] | None"]


def fuse(
    plan: OpPlan, num_rows: int, *, is_windowed: bool = False, exchange: RankExchange | None = None
) -> OpPlan:
    """A plan that gives the same, but for the order of sums, for steps of exactly ``num_rows`` tokens.

    Of more than one token it is the plan itself: the library multiplies a few rows faster than kernels that do more.

    Args:
        is_windowed: some layer's attention has a window, which a decode stack does not know.
        exchange: with the other ranks of a plan that is one rank's.
    """
    if num_rows != 1:
        return plan
    stacked = None if is_windowed else stack_layers(plan, exchange)
    if stacked is not None:
        return stacked
    fuser = _Fuser(plan)
    calls = list(plan.calls)
    for rule in (fuser.linear_then_add, fuser.linear_then_act, fuser.norm_then_linear):
        calls = fuser.rewrite(calls, rule)
    return OpPlan(calls, plan.buffers, plan.result)


class _Fuser:
    """Rules for pairs of neighbours, and where they apply."""

    def __init__(self, plan: OpPlan) -> None:
        self._result = plan.result.name
        names = [buffer.name for buffer in plan.buffers]
        self._widths = {buffer.name: buffer.width for buffer in plan.buffers if names.count(buffer.name) == 1}

    def rewrite(self, calls: Sequence[OpCall], rule: Rule) -> list[OpCall]:
        """Replace the pairs that ``rule`` knows, if what links them dies with the second."""
        done: list[OpCall] = []
        index = 0
        while index < len(calls):
            replaced = rule(*calls[index : index + 2]) if index + 1 < len(calls) else None
            if replaced is not None and not self._is_link_dead(calls, index):
                replaced = None
            done += replaced or [calls[index]]
            index += 2 if replaced else 1
        return done

    def linear_then_add(self, first: OpCall, second: OpCall) -> list[OpCall] | None:
        """The residual takes the product at once; the norm is left alone."""
        if first.name != "linear" or second.name != "add_rms_norm" or not can_fuse(first.args[1]):
            return None
        x, weight, bias, link, _ = first.args
        added, residual, norm, eps, out = second.args
        if added != link:
            return None
        return [
            _call("linear_add", linear_add, x, weight, bias, residual),
            _call("rms_norm", rms_norm, residual, norm, eps, out),
        ]

    def linear_then_act(self, first: OpCall, second: OpCall) -> list[OpCall] | None:
        """The product is activated before it is stored."""
        if first.name != "linear" or second.name != "gated_act" or not can_fuse(first.args[1]):
            return None
        x, weight, bias, _, _ = first.args
        _, kind, out = second.args
        return [_call("gated_linear", gated_linear, x, weight, bias, kind, out)]

    def norm_then_linear(self, first: OpCall, second: OpCall) -> list[OpCall] | None:
        """Every program of the product normalises for itself."""
        if first.name != "rms_norm":
            return None
        x, norm, eps, link = first.args
        if second.args[0] != link:
            return None
        if second.name == "linear" and can_fuse(second.args[1]):
            return [_call("norm_linear", norm_linear, x, norm, eps, *second.args[1:])]
        if second.name == "gated_linear":
            return [_call("norm_gated_linear", norm_gated_linear, x, norm, eps, *second.args[1:])]
        return None

    def _is_link_dead(self, calls: Sequence[OpCall], index: int) -> bool:
        """Whether what call ``index`` writes is read by the next one and by none after it, before it is overwritten."""
        link = self._output_of(calls[index])
        if link is None or not _uses(calls[index + 1], link):
            return False
        for following in range(index + 2, len(calls)):
            uses = _uses(calls[following], link)
            if uses:
                return uses == 1 and self._output_of(calls[following]) == link
        return link.name != self._result

    def _output_of(self, call: OpCall) -> Symbol | None:
        """The buffer that a call overwrites as a whole."""
        if call.name == "linear":
            _, weight, _, out, col = call.args
            is_whole = col == 0 and self._widths.get(getattr(out, "name", "")) == weight.shape[0]
            return out if is_whole else None
        place = _OUTPUT_PLACES.get(call.name)
        out = None if place is None else call.args[place]
        return out if isinstance(out, Symbol) else None


def _uses(call: OpCall, symbol: Symbol) -> int:
    """How often a call has the symbol among its arguments. Tensors among them are not compared, which is slow."""
    return sum(index == symbol.index for _, index in call.symbols)


def _call(name: str, op: Callable[..., None], *args: Any) -> OpCall:
    symbols = tuple((place, value.index) for place, value in enumerate(args) if isinstance(value, Symbol))
    return OpCall(name, op, args, symbols)
