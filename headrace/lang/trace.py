"""Tracing: what a program says before anything depends on its differing arguments or on the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.lang.conversation import Conversation
from headrace.lang.pieces import Piece, Text, Turn, flatten

# A private-use character: no prompt has it, and no change of case, stripping or splitting takes it apart.
_MARK = "\uf2c7"


class _EndOfTrace(BaseException):
    """The program came to something that is not known ahead. Not an Exception, so that programs do not catch it."""


class _Recorder:
    """Stands in for a State: takes text up to the first thing that is not known."""

    def __init__(self) -> None:
        self.conversation = Conversation()

    def __iadd__(self, piece: Piece | str) -> _Recorder:
        for part in flatten(piece):
            if isinstance(part, Turn):
                self.conversation = self.conversation.begin(part.role)
                for inner in part.parts:
                    self._take(inner)
                self.conversation = self.conversation.end()
            else:
                self._take(part)
        return self

    def _take(self, piece: Piece) -> None:
        if not isinstance(piece, Text):
            raise _EndOfTrace
        known, mark, _ = piece.text.partition(_MARK)
        self.conversation = self.conversation.append(known)
        if mark:
            raise _EndOfTrace

    def __getattr__(self, name: str) -> Any:
        raise _EndOfTrace

    def __getitem__(self, name: str) -> Any:
        raise _EndOfTrace


def shared_beginning(function: Callable[..., Any], batch: Sequence[Mapping[str, Any]]) -> Conversation:
    """What runs of a program over ``batch`` surely begin with.

    The program's own code runs once, up to the first ``gen``, ``select``, read of the state or use of an argument that
    differs in the batch; such arguments are texts of private-use characters there. A program that fails on those is
    traced up to where it fails.
    """
    first = batch[0]
    arguments = {
        name: value if all(name in other and _same(other[name], value) for other in batch) else _MARK
        for name, value in first.items()
    }
    recorder = _Recorder()
    try:
        function(recorder, **arguments)
    except (_EndOfTrace, Exception):  # whatever the program makes of a mark in an argument's place
        return recorder.conversation
    return recorder.conversation


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one is other or one == other)
    except Exception:  # arrays and the like have no plain answer
        return False
