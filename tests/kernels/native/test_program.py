"""A recorded forward in one native call: bitwise what the ops give one by one, for any number of tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headrace.kernels.arena import Arena
from headrace.kernels.native.linear import pack_weight
from headrace.kernels.native.program import Program
from headrace.kernels.op_plan import record
from headrace.kernels.registry import Ops
from tests.kernels.test_op_plan import Step, step

pytestmark = pytest.mark.usefixtures("instruction_set", "threads")


class Model:
    """A small network of the ops that need no cache; ``between`` is called half-way."""

    def __init__(self, between: Callable[[Ops, torch.Tensor], None] | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ops = Ops.for_device("cpu", "native")
        self.arena = Arena("cpu")
        self._between = between
        self._table = pack_weight(torch.randn(3, 20, generator=generator))
        self._up = [pack_weight(torch.randn(24, 20, generator=generator)) for _ in range(2)]
        self._down = pack_weight(torch.randn(20, 24, generator=generator).bfloat16())
        self._bias, self._norm = torch.randn(20, generator=generator), torch.rand(20, generator=generator)
        self._buffers = [
            self.arena.buffer(name, width, torch.float32)
            for name, width in (("hidden", 20), ("residual", 20), ("inner", 48), ("activated", 24))
        ]

    def forward(self, batch: Step) -> torch.Tensor:
        hidden, residual, inner, activated = (buffer.rows(batch.num_tokens) for buffer in self._buffers)
        ops = self.ops
        ops.embedding(batch.input_ids, self._table, residual, 2.0)
        ops.rms_norm(residual, self._norm, 1e-5, hidden)
        for part, weight in enumerate(self._up):
            ops.linear(hidden, weight, None, inner, part * 24)
        if self._between is not None:
            self._between(ops, inner)
        ops.gated_act(inner, "silu", activated)
        ops.linear(activated, self._down, self._bias, hidden)
        ops.add_rms_norm(hidden, residual, self._norm, 1e-5, hidden)
        return hidden


def check(model: Model, num_runs: int) -> None:
    plan = record(model, step(5))
    program = Program(plan, step(5))
    assert program.num_native_runs == num_runs
    for num_tokens in (5, 1, 300, 7):
        expected = model.forward(step(num_tokens)).clone()
        model.arena.buffers()[0].rows(num_tokens).fill_(torch.nan)
        assert torch.equal(program.run(step(num_tokens)), expected) and len(expected) == num_tokens


def test_one_call() -> None:
    check(Model(), 1)


def test_other_ops_run_in_between() -> None:
    check(Model(lambda ops, x: ops.all_reduce(x)), 2)


def test_parts_are_written_where_they_belong() -> None:
    """A pointer into the middle of a buffer follows the buffer when that moves."""
    model = Model()
    program = Program(record(model, step(2)), step(2))
    model.arena.reserve(1000)
    assert torch.equal(program.run(step(2)), model.forward(step(2)))
