"""OpPlan: a model's forward as a flat list of (op, arguments), recorded once and replayed for any number of tokens.

The model file stays the only description of an architecture: recording runs its ``forward`` with ops that note their
arguments. An argument is a constant (weights, numbers), a view of an arena buffer (its rows follow the number of
tokens) or a field of the batch (ids, positions, slots, plans).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from headrace.kernels.arena import Arena, Buffer
from headrace.kernels.registry import Op, Ops

Batch = Any
Resolver = Callable[[Batch], Any]


class HasForward(Protocol):
    """A model: ``forward`` calls nothing but ``ops``, over views of ``arena``'s buffers and fields of the batch."""

    ops: Ops
    arena: Arena

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states of every token."""


class OpPlan:
    """The recorded calls. ``replay`` runs them for another batch and returns what ``forward`` would."""

    def __init__(self, calls: list[tuple[Op, list[Resolver], dict[str, Resolver]]], result: Resolver) -> None:
        self._calls = calls
        self._result = result

    def __len__(self) -> int:
        return len(self._calls)

    def replay(self, batch: Batch) -> torch.Tensor:
        """Run the forward over ``batch``; bitwise what the model's own ``forward`` gives."""
        for op, args, kwargs in self._calls:
            op(*(arg(batch) for arg in args), **{name: arg(batch) for name, arg in kwargs.items()})
        out: torch.Tensor = self._result(batch)
        return out


def record(model: HasForward, batch: Batch) -> OpPlan:
    """Run ``model.forward(batch)`` once and keep its calls.

    Raises: AssertionError when an op is given a tensor that is neither a whole buffer view, a field of the batch nor
        the same memory on every step (a tensor made during the forward, which a replay could not find again).
    """
    recorder = _Recorder(model.arena, batch)
    table, ops = model.ops.table, model.ops
    try:
        for name, op in table.items():
            setattr(ops, name, recorder.wrap(op))
        result = model.forward(batch)
    finally:
        for name, op in table.items():
            setattr(ops, name, op)
    return OpPlan(recorder.calls, recorder.resolver(result))


class _Recorder:
    def __init__(self, arena: Arena, batch: Batch) -> None:
        self.calls: list[tuple[Op, list[Resolver], dict[str, Resolver]]] = []
        self._arena = arena
        self._batch = batch
        self._fields: dict[int, Resolver] = {
            id(batch.input_ids): lambda b: b.input_ids,
            id(batch.positions): lambda b: b.positions,
        }
        for index, group in enumerate(batch.groups):
            self._fields[id(group.slot_mapping)] = _group_field(index, "slot_mapping")
            self._fields[id(group.plan)] = _group_field(index, "plan")

    def wrap(self, op: Op) -> Op:
        def call(*args: Any, **kwargs: Any) -> None:
            names = {name: self.resolver(value) for name, value in kwargs.items()}
            self.calls.append((op, [self.resolver(value) for value in args], names))
            op(*args, **kwargs)

        return call

    def resolver(self, value: Any) -> Resolver:
        """How to find the value again for another batch."""
        if id(value) in self._fields:
            return self._fields[id(value)]
        if isinstance(value, torch.Tensor):
            buffer = self._buffer_of(value)
            if buffer is not None:
                return lambda b: buffer.rows(b.num_tokens)
            assert value.shape[:1] != (self._batch.num_tokens,) or value.is_leaf, "a tensor of this step only"
        return lambda b: value

    def _buffer_of(self, value: torch.Tensor) -> Buffer | None:
        num_tokens = self._batch.num_tokens
        for buffer in self._arena.buffers():
            view = buffer._view
            if view is value and view.shape[0] == num_tokens:
                return buffer
        return None


def _group_field(index: int, name: str) -> Resolver:
    return lambda batch: getattr(batch.groups[index], name)
