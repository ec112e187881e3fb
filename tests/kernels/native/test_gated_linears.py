"""A linear and the gated_act behind it as one op: bitwise what both give one after the other."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.arena import Arena
from headrace.kernels.native.linear import pack_weight
from headrace.kernels.native.program import Program
from headrace.kernels.native.structs import OP_NUMBERS, GatedActArgs, LinearGatedArgs
from headrace.kernels.op_plan import record
from headrace.kernels.reference.activation import GatedActKind
from headrace.kernels.registry import Ops
from tests.kernels.test_op_plan import Step, step

pytestmark = pytest.mark.usefixtures("instruction_set", "threads")
NUM_INPUTS = 64


class Model:
    """One gated layer. is_shared: what lies between linear and activation is read once more.

    of_parts: gates and factors are linears of their own.  is_reduced: an op without a native form reads it afterwards.
    """

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        kind: GatedActKind = "silu",
        is_shared: bool = False,
        of_parts: bool = False,
        is_reduced: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ops = Ops.for_device("cpu", "native")
        self.arena = Arena("cpu")
        self._width, self._kind, self._is_shared, self._of_parts = width, kind, is_shared, of_parts
        self._is_reduced = is_reduced
        self._table = torch.randn(3, NUM_INPUTS, generator=generator).to(dtype)
        self._weight = (torch.randn(2 * width, NUM_INPUTS, generator=generator) / 8).to(dtype)
        self._packed = pack_weight(self._weight)
        self._halves = [pack_weight(half) for half in self._weight.split(width)]
        self._down = pack_weight((torch.randn(NUM_INPUTS, width, generator=generator) / width).to(dtype))
        self._buffers = [
            self.arena.buffer(name, size, dtype)
            for name, size in (("hidden", NUM_INPUTS), ("inner", 2 * width), ("activated", width))
        ]

    def forward(self, batch: Step) -> torch.Tensor:
        hidden, inner, activated = (buffer.rows(batch.num_tokens) for buffer in self._buffers)
        self.ops.embedding(batch.input_ids, self._table, hidden, 1.0)
        for _ in range(2):
            if self._of_parts:
                for part, weight in enumerate(self._halves):
                    self.ops.linear(hidden, weight, None, inner, part * self._width)
            else:
                self.ops.linear(hidden, self._packed, None, inner)
            self.ops.gated_act(inner, self._kind, activated)
            if self._is_shared:
                self.ops.soft_cap(inner, 3.0)
                self.ops.gated_act(inner, self._kind, activated)
            if self._is_reduced:
                self.ops.all_reduce(inner)
            self.ops.linear(activated, self._down, None, hidden)
        return hidden


def ops_of(program: Program) -> list[int]:
    runs = [part for part in program._parts if not isinstance(part, list)]
    return [call.op for run in runs for call in run.calls]


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 16, 24, 48])
def test_both_in_one(width: int, dtype: torch.dtype, kind: GatedActKind) -> None:
    model = Model(width, dtype, kind)
    program = Program(record(model, step(5)), step(5))
    assert ops_of(program).count(OP_NUMBERS[LinearGatedArgs]) == 2
    assert OP_NUMBERS[GatedActArgs] not in ops_of(program)
    for num_tokens in (5, 1, 2, 3, 16, 33, 1200, 7):
        expected = model.forward(step(num_tokens)).clone()
        model.arena.buffers()[0].rows(num_tokens).fill_(torch.nan)
        assert torch.equal(program.run(step(num_tokens)), expected)


@pytest.mark.parametrize("options", [{"is_shared": True}, {"of_parts": True}, {"is_reduced": True}])
def test_what_others_read_is_written(options: dict[str, bool]) -> None:
    model = Model(32, torch.bfloat16, **options)
    program = Program(record(model, step(5)), step(5))
    assert OP_NUMBERS[LinearGatedArgs] not in ops_of(program)
    expected = model.forward(step(40)).clone()
    assert torch.equal(program.run(step(40)), expected)
