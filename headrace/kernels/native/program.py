"""Program: a recorded forward whose native ops run in as few calls as can be, mostly one, on one team of threads.

A ``NativeOp`` takes part. A pointer that differs from step to step is in the field of its struct that is named like the
parameter. Other ops (collectives, what the reference alone has) run in between, as they are.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch

from headrace.kernels.native.attention import plan_address
from headrace.kernels.native.gated_linears import Filled, merge_gated
from headrace.kernels.native.library import library
from headrace.kernels.native.native_op import NativeOp
from headrace.kernels.native.structs import OP_NUMBERS, Call, Patch
from headrace.kernels.op_plan import Batch, OpCall, OpPlan
from headrace.kernels.registry import Op


@dataclass(frozen=True, slots=True, eq=False)
class NativeRun:
    """Consecutive native calls. ``kept``: what the calls point to."""

    calls: ctypes.Array[Call]
    kept: list[Any]


class Program:
    """See above. ``run`` gives what the plan's own ``replay`` would.

    Args:
        plan: the recorded forward.
        batch: any batch, whose sizes and addresses fill the structs in for the first time.
    """

    def __init__(self, plan: OpPlan, batch: Batch) -> None:
        self._plan = plan
        self._attention_shape = _attention_shape(plan)
        values = plan.values(batch)
        addresses = [self._address(value) for value in values]
        self._parts: list[NativeRun | list[OpCall]] = []
        kept = {
            index
            for call in plan.calls
            if call.name not in ("linear", "gated_act")
            for _, index in call.symbols
        }
        for is_native, calls in groupby(plan.calls, key=lambda call: isinstance(call.op, NativeOp)):
            members = list(calls)
            self._parts.append(_compile(members, values, addresses, kept) if is_native else members)

    @property
    def num_native_runs(self) -> int:
        """Calls into the library that a step takes."""
        return sum(isinstance(part, NativeRun) for part in self._parts)

    def run(self, batch: Batch) -> torch.Tensor:
        """The forward over ``batch``."""
        values = self._plan.values(batch)
        found = [self._address(value) for value in values]
        addresses = (ctypes.c_void_p * len(found))(*found)
        num_threads = torch.get_num_threads()
        for part in self._parts:
            if isinstance(part, NativeRun):
                library().run_program(part.calls, addresses, batch.num_tokens, num_threads)
            else:
                for call in part:
                    call.op(*_arguments(call, values))
        return self._plan.result.rows(batch.num_tokens)

    def _address(self, value: Any) -> int | None:
        if isinstance(value, torch.Tensor):
            return value.data_ptr()
        shape = self._attention_shape
        return None if shape is None else plan_address(value, *shape)


def _compile(
    members: Sequence[OpCall],
    values: Sequence[Any],
    addresses: Sequence[int | None],
    kept_values: Set[int],
) -> NativeRun:
    return native_run(merge_gated([filled(member, values, addresses) for member in members], kept_values))


def native_run(filled: Sequence[Filled]) -> NativeRun:
    """The calls as the library takes them."""
    calls = (Call * len(filled))()
    kept: list[Any] = []
    for call, one in zip(calls, filled, strict=True):
        patches = (Patch * len(one.patches))()
        for patch, (offset, value, num_bytes) in zip(patches, one.patches, strict=True):
            patch.offset, patch.value, patch.bytes = offset, value, num_bytes
        call.op, call.num_patches = OP_NUMBERS[type(one.args)], len(patches)
        call.args, call.patches = ctypes.addressof(one.args), patches
        kept += (one.args, patches)
    return NativeRun(calls, kept)


def filled(member: OpCall, values: Sequence[Any], addresses: Sequence[int | None]) -> Filled:
    """A recorded call with its struct; ``values`` are what its symbols stand for, at ``addresses``."""
    assert isinstance(member.op, NativeOp)
    args = member.op.fill(*_arguments(member, values))
    names = _parameters(member.op)
    patches = [
        (
            getattr(type(args), names[place]).offset,
            index,
            getattr(args, names[place]) - (addresses[index] or 0),
        )
        for place, index in member.symbols
    ]
    assert all(offset for offset, _, _ in patches), "the first field is the number of rows, never a pointer"
    return Filled(args, tuple(patches))


def _arguments(call: OpCall, values: Sequence[Any]) -> list[Any]:
    args = list(call.args)
    for place, index in call.symbols:
        args[place] = values[index]
    return args


@cache
def _parameters(op: Op) -> tuple[str, ...]:
    """Their names. Looking them up takes as long as a small op, and a forward has hundreds."""
    return tuple(inspect.signature(op).parameters)


def _attention_shape(plan: OpPlan) -> tuple[int, int] | None:
    """(query heads, head dim) of the attention ops, which share the room for partial results; None: there are none."""
    shapes = {_shape_of(call) for call in plan.calls if call.name == "attention"}
    assert len(shapes) <= 1, "layers with different heads would need a plan each"
    return shapes.pop() if shapes else None


def _shape_of(call: OpCall) -> tuple[int, int]:
    bound = dict(zip(_parameters(call.op), call.args, strict=True))
    return bound["num_heads"], bound["head_dim"]
