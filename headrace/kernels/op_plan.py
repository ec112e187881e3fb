"""OpPlan: a model's forward as a flat list of (op, arguments), recorded once and replayed for any number of tokens.

The model file stays the only description of an architecture: recording runs its ``forward`` with ops that note their
arguments. An argument is

* a field of the batch (ids, positions, a group's slot mapping or attention plan),
* the view of an arena buffer, whose rows follow the number of tokens,
* a constant (weights, caches, numbers).

The first two are kept as symbols, so the number of tokens is nowhere in the plan.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headrace.kernels.arena import Arena, Buffer
from headrace.kernels.registry import Op, Ops

Batch = Any
"""A ``ForwardBatch``, which this room cannot import."""


_PLAN = "plan "


class HasForward(Protocol):
    """A model: ``forward`` calls nothing but ``ops``, over views of ``arena``'s buffers and fields of the batch."""

    ops: Ops
    arena: Arena

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states of every token, in a buffer of the arena."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument that each replay looks up.

    name: for people: "positions", "plan 0", or the buffer's name.
    index: place among the values of a replay: the batch's fields, then the views of ``OpPlan.buffers``.
    """

    name: str
    index: int

    @property
    def is_attention_plan(self) -> bool:
        """Whether it stands for a group's attention plan."""
        return self.name.startswith(_PLAN)


@dataclass(frozen=True, slots=True)
class OpCall:
    """One recorded call.

    name: of the op in the table.
    op: its function.
    args: every parameter in order, defaults filled in; Symbols where replays differ.
    symbols: (place in ``args``, index of the value).
    """

    name: str
    op: Op
    args: tuple[Any, ...]
    symbols: tuple[tuple[int, int], ...]


class OpPlan:
    """The recorded calls. ``replay`` runs them for another batch and returns what ``forward`` would."""

    def __init__(self, calls: Sequence[OpCall], buffers: Sequence[Buffer], result: Buffer) -> None:
        self.calls = tuple(calls)
        self.buffers = tuple(buffers)
        self.result = result

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def reads_attention_work(self) -> bool:
        """Whether some op reads more of an attention plan than its block table. An op that does not has an attribute
        ``reads_block_table_only``."""
        return any(
            isinstance(value, Symbol) and value.is_attention_plan
            for call in self.calls
            if not getattr(call.op, "reads_block_table_only", False)
            for value in call.args
        )

    def replay(self, batch: Batch) -> torch.Tensor:
        """Run the forward over ``batch``; bitwise what the model's own ``forward`` gives."""
        values = self.values(batch)
        for call in self.calls:
            args = list(call.args)
            for place, index in call.symbols:
                args[place] = values[index]
            call.op(*args)
        return self.result.rows(batch.num_tokens)

    def values(self, batch: Batch) -> list[Any]:
        """What the symbols stand for in ``batch``, by their indices."""
        return _batch_values(batch) + [buffer.rows(batch.num_tokens) for buffer in self.buffers]


def record(model: HasForward, batch: Batch) -> OpPlan:
    """Run ``model.forward(batch)`` once and keep its calls.

    Raises: AssertionError when an op is given a tensor that was made during the forward, or part of a buffer: a
        replay could not find it again.
    """
    buffers, fields = model.arena.buffers(), _batch_values(batch)
    names = ["input_ids", "positions"]
    for group in range(len(batch.groups)):
        names += (f"slot_mapping {group}", f"{_PLAN}{group}")
    symbols = list(zip(names, fields, strict=True))
    symbols += ((buffer.name, buffer.rows(batch.num_tokens)) for buffer in buffers)
    calls, result = OpRecorder(model.ops, symbols).record(lambda: model.forward(batch))
    assert isinstance(result, Symbol) and result.index >= len(fields), (
        "a forward returns a view of an arena buffer"
    )
    return OpPlan(calls, buffers, buffers[result.index - len(fields)])


class OpRecorder:
    """Notes ops. Tensors that are no symbols are only watched while they run: those that have died by the end were not
    constants.

    Args:
        ops: the table that is called.
        symbols: (name, value) of what replays look up, in the order of their indices.
    """

    def __init__(self, ops: Ops, symbols: Sequence[tuple[str, Any]]) -> None:
        self._ops = ops
        self._symbols = {id(value): Symbol(name, index) for index, (name, value) in enumerate(symbols)}
        assert len(self._symbols) == len(symbols), "what replays look up are different objects"
        self._calls: list[tuple[str, Op, list[Any]]] = []

    def record(self, run: Callable[[], Any]) -> tuple[list[OpCall], Any]:
        """The ops that ``run()`` calls, and what it returns: the symbol of that, if it has one."""
        ops, plain = self._ops, self._ops.table
        try:
            for name, op in plain.items():
                setattr(ops, name, self._noting(name, op))
            result = run()
        finally:
            for name, op in plain.items():
                setattr(ops, name, op)
        calls = [_finished(name, op, args) for name, op, args in self._calls]
        return calls, self._symbols.get(id(result), result)

    def _noting(self, name: str, op: Op) -> Op:
        signature = inspect.signature(op)

        def call(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self._calls.append((name, op, [self._argument(value) for value in bound.args]))
            op(*args, **kwargs)

        return call

    def _argument(self, value: Any) -> Any:
        if id(value) in self._symbols:
            return self._symbols[id(value)]
        return weakref.ref(value) if isinstance(value, torch.Tensor) else value


def _finished(name: str, op: Op, noted: list[Any]) -> OpCall:
    args = [value() if isinstance(value, weakref.ref) else value for value in noted]
    for given, value in zip(noted, args, strict=True):
        is_lost = isinstance(given, weakref.ref) and value is None
        assert not is_lost, (
            f"op {name} was given a tensor of this step only: neither a whole buffer nor a constant"
        )
    symbols = [(place, value.index) for place, value in enumerate(args) if isinstance(value, Symbol)]
    return OpCall(name, op, tuple(args), tuple(symbols))


def _batch_values(batch: Batch) -> list[Any]:
    values = [batch.input_ids, batch.positions]
    for group in batch.groups:
        values += (group.slot_mapping, group.plan)
    return values
