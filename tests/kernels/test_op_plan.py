"""Recording: what becomes a symbol, what stays a constant, and what cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from headrace.kernels.arena import Arena
from headrace.kernels.op_plan import OpCall, OpPlan, Symbol, record
from headrace.kernels.registry import Ops


@dataclass(eq=False)
class Group:
    slot_mapping: torch.Tensor
    plan: object


@dataclass(eq=False)
class Step:
    num_tokens: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[Group, ...] = ()


def step(num_tokens: int) -> Step:
    return Step(num_tokens, torch.arange(num_tokens) % 3, torch.arange(num_tokens))


class Model:
    """Looks rows up, and does one more thing to them."""

    def __init__(
        self, then: Callable[[Model, Step, torch.Tensor, torch.Tensor], torch.Tensor | None]
    ) -> None:
        self.ops = Ops.for_device("cpu", "reference")
        self.arena = Arena("cpu")
        self.table = torch.arange(12.0).view(3, 4)
        self.weight = torch.full((4,), 2.0)
        self._a = self.arena.buffer("a", 4, torch.float32)
        self._b = self.arena.buffer("b", 4, torch.float32)
        self._then = then

    def forward(self, batch: Step) -> torch.Tensor:
        a, b = self._a.rows(batch.num_tokens), self._b.rows(batch.num_tokens)
        self.ops.embedding(batch.input_ids, self.table, out=a)
        result = self._then(self, batch, a, b)
        return b if result is None else result


def normed(model: Model, batch: Step, a: torch.Tensor, b: torch.Tensor) -> None:
    model.ops.rms_norm(a, model.weight, 1e-6, b)


def test_replay_for_other_numbers_of_tokens() -> None:
    model = Model(normed)
    plan = record(model, step(5))
    assert len(plan) == 2
    for num_tokens in (1, 7, 5):
        expected = model.forward(step(num_tokens)).clone()
        assert torch.equal(plan.replay(step(num_tokens)), expected) and len(expected) == num_tokens


def test_arguments_are_normalised_to_the_op_s_parameters() -> None:
    """Keywords and defaults become positions; constants stay the very same objects."""
    model = Model(normed)
    embedding, norm = record(model, step(2)).calls
    assert embedding.args == (Symbol("input_ids", 0), model.table, Symbol("a", 2), 1.0, None)
    assert embedding.symbols == ((0, 0), (2, 2))
    assert norm.args[1] is model.weight and norm.args[2:] == (1e-6, Symbol("b", 3))


def test_ops_are_plain_again_after_recording() -> None:
    def failing(model: Model, batch: Step, a: torch.Tensor, b: torch.Tensor) -> None:
        raise RuntimeError("no")

    model = Model(failing)
    plain = dict(model.ops.table)
    with pytest.raises(RuntimeError):
        record(model, step(2))
    assert all(getattr(model.ops, name) is op for name, op in plain.items())


def temporary(model: Model, batch: Step, a: torch.Tensor, b: torch.Tensor) -> None:
    model.ops.rms_norm(a + 1, model.weight, 1e-6, b)


def part_of_a_buffer(model: Model, batch: Step, a: torch.Tensor, b: torch.Tensor) -> None:
    model.ops.rms_norm(a[:, :4], model.weight, 1e-6, b)


def derived_from_the_batch(model: Model, batch: Step, a: torch.Tensor, b: torch.Tensor) -> None:
    model.ops.gather_rows(a, batch.positions.flip(0), b)


@pytest.mark.parametrize("then", [temporary, part_of_a_buffer, derived_from_the_batch])
def test_tensors_of_one_step_only_are_refused(
    then: Callable[[Model, Step, torch.Tensor, torch.Tensor], None],
) -> None:
    with pytest.raises(AssertionError, match="of this step only"):
        record(Model(then), step(3))


def test_a_forward_must_return_a_buffer() -> None:
    with pytest.raises(AssertionError, match="arena buffer"):
        record(Model(lambda model, batch, a, b: a.clone()), step(3))


def test_values_of_groups_are_symbols() -> None:
    seen: list[object] = []

    def planned(model: Model, batch: Step, a: torch.Tensor, b: torch.Tensor) -> None:
        model.ops.gather_rows(a, batch.groups[1].slot_mapping, b)

    def with_groups(num_tokens: int) -> Step:
        groups = [Group(torch.arange(num_tokens).flip(0), object()) for _ in range(2)]
        seen.extend(group.plan for group in groups)
        return Step(num_tokens, torch.arange(num_tokens) % 3, torch.arange(num_tokens), tuple(groups))

    model = Model(planned)
    plan = record(model, with_groups(3))
    assert plan.calls[1].args[1] == Symbol("slot_mapping 1", 4)
    assert not plan.reads_attention_work
    other = with_groups(6)
    assert torch.equal(plan.replay(other), model.table[other.input_ids].flip(0))


def test_whether_attention_work_is_read() -> None:
    """By any op that is given a plan, unless the op says that it reads the block table only."""

    def read(plan: object) -> None: ...

    def look_up(plan: object) -> None: ...

    look_up.reads_block_table_only = True  # type: ignore[attr-defined]
    calls = [OpCall(op.__name__, op, (Symbol("plan 0", 3),), ((0, 3),)) for op in (read, look_up)]
    buffer = Arena("cpu").buffer("a", 4, torch.float32)
    assert OpPlan(calls, [buffer], buffer).reads_attention_work
    assert not OpPlan(calls[1:], [buffer], buffer).reads_attention_work
