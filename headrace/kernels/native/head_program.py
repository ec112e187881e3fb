"""HeadProgram: a recorded head and the best token of each row as one native call.

The logits are looked at where they are computed: if nothing comes between the product and the search, they are not even
written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.kernels.arena import Buffer
from headrace.kernels.native.gated_linears import Filled
from headrace.kernels.native.library import library
from headrace.kernels.native.native_op import NativeOp
from headrace.kernels.native.program import filled, native_run
from headrace.kernels.native.sampling import best_of_rows, row_argmax_args
from headrace.kernels.native.structs import LinearArgmaxArgs, LinearArgs, RowArgmaxArgs
from headrace.kernels.op_plan import OpCall, OpRecorder, Symbol
from headrace.kernels.registry import Ops


class HasHead(Protocol):
    """A model whose head calls nothing but ``ops``, over ``head_buffers``."""

    ops: Ops

    @property
    def head_buffers(self) -> Sequence[Buffer]:
        """What ``compute_logits`` writes."""

    def compute_logits(self, hidden: Tensor, rows: Tensor) -> Any:
        """``SlicedLogits`` of the hidden states [T, E] at ``rows`` [R] int64."""


class HeadProgram:
    """``run`` gives what ``row_argmax`` gives of the head's logits, bitwise.

    Args:
        calls: the head's ops. Symbols 0 and 1 are hidden states and rows, the next ones are ``buffers``.
        logits: the symbol of what they come to.
        inputs: hidden states and rows, as recorded.
    """

    def __init__(
        self,
        calls: Sequence[OpCall],
        buffers: Sequence[Buffer],
        logits: Symbol,
        inputs: tuple[Tensor, Tensor],
    ) -> None:
        self._buffers = buffers
        num_rows = len(inputs[1])
        values, tokens = best_of_rows(num_rows)
        symbols = [*inputs, *(buffer.rows(num_rows) for buffer in buffers), values, tokens]
        addresses = [symbol.data_ptr() for symbol in symbols]
        argmax = row_argmax_args(symbols[logits.index], values, tokens)
        places = (("x", logits.index), ("values", len(symbols) - 2), ("indices", len(symbols) - 1))
        patches = [(getattr(RowArgmaxArgs, name).offset, index, 0) for name, index in places]
        ops = [filled(call, symbols, addresses) for call in calls]
        self._run = native_run(_merge([*ops, Filled(argmax, tuple(patches))]))
        self._addresses = (ctypes.c_void_p * len(symbols))()

    @classmethod
    def record(cls, model: HasHead, hidden: Tensor, rows: Tensor) -> HeadProgram | None:
        """Computes logits once. None: the head has ops that are not native, or a part of the vocabulary only."""
        buffers = model.head_buffers
        symbols = [("hidden", hidden), ("rows", rows), *((one.name, one.rows(len(rows))) for one in buffers)]

        def run() -> Tensor | None:
            logits = model.compute_logits(hidden, rows)
            whole: Tensor | None = logits.padded if logits.slices is None else None
            return whole

        calls, logits = OpRecorder(model.ops, symbols).record(run)
        is_native = all(isinstance(call.op, NativeOp) for call in calls)
        if not is_native or not isinstance(logits, Symbol):
            return None
        return cls(calls, buffers, logits, (hidden, rows))

    def run(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """([R] float32, [R] int64): the largest logit of the hidden states at ``rows`` [R] int64, and its token."""
        num_rows = len(rows)
        values, tokens = best_of_rows(num_rows)
        buffers = [buffer.rows(num_rows).data_ptr() for buffer in self._buffers]
        self._addresses[:] = [
            hidden.data_ptr(),
            rows.data_ptr(),
            *buffers,
            values.data_ptr(),
            tokens.data_ptr(),
        ]
        library().run_program(self._run.calls, self._addresses, num_rows, torch.get_num_threads())
        return values, tokens


def _merge(calls: Sequence[Filled]) -> list[Filled]:
    """The last two as one if they are a linear and the search in all of its output."""
    *others, linear, argmax = calls
    args, found = linear.args, argmax.args
    is_pair = type(args) is LinearArgs and (args.out, args.num_outputs) == (found.x, found.width)
    if not is_pair:
        return list(calls)
    start = LinearArgmaxArgs.argmax.offset
    patches = [(start + offset, index, num_bytes) for offset, index, num_bytes in argmax.patches]
    return [*others, Filled(LinearArgmaxArgs(args, found), linear.patches + tuple(patches))]
