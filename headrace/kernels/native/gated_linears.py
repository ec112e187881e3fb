"""A linear and the gated_act behind it as one op: what lies between them is half of what a layer writes."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from headrace.kernels.native.structs import GatedActArgs, LinearArgs, LinearGatedArgs


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """A native call of a program.

    args: its struct, filled in for some batch.
    patches: (offset of a pointer in it, index of the value that it follows from step to step, bytes from there on).
    """

    args: ctypes.Structure
    patches: tuple[tuple[int, int, int], ...]


def merge_gated(calls: Sequence[Filled], kept: Set[int]) -> list[Filled]:
    """The same calls, in which each linear whose output nothing but the gated_act behind it uses is one with it.

    kept: indices of values that ops of other kinds use, be it in another native run or between two.
    """
    uses = Counter(index for call in calls for index in {index for _, index, _ in call.patches})
    pairs = [pair for pair in pairwise(calls) if _is_pair(*pair)]
    num_paired = Counter(_value_of(act, "gate_up") for _, act in pairs)
    shared = {
        value
        for value, count in num_paired.items()
        if value is None or value in kept or uses[value] != 2 * count
    }
    merged = {id(linear): act for linear, act in pairs if _value_of(act, "gate_up") not in shared}
    return list(_with_merged(calls, merged))


def _with_merged(calls: Sequence[Filled], merged: dict[int, Filled]) -> Iterator[Filled]:
    followers = {id(act) for act in merged.values()}
    for call in calls:
        if id(call) in merged:
            yield _merge(call, merged[id(call)])
        elif id(call) not in followers:
            yield call


def _merge(linear: Filled, act: Filled) -> Filled:
    start = LinearGatedArgs.act.offset
    patches = [(start + offset, index, num_bytes) for offset, index, num_bytes in act.patches]
    return Filled(LinearGatedArgs(linear.args, act.args), linear.patches + tuple(patches))


def _is_pair(linear: Filled, act: Filled) -> bool:
    """Does the act read just what the linear writes?"""
    if type(linear.args) is not LinearArgs or type(act.args) is not GatedActArgs:
        return False
    between = _value_of(act, "gate_up")
    return (
        between is not None
        and between == _value_of(linear, "out")
        and linear.args.out == act.args.gate_up
        and linear.args.num_outputs == 2 * act.args.width
        and linear.args.out_dtype == act.args.dtype
    )


def _value_of(call: Filled, field: str) -> int | None:
    """The value that a pointer follows; None: it is a constant."""
    offset = getattr(type(call.args), field).offset
    return next((index for at, index, _ in call.patches if at == offset), None)
