"""ToolFormat: one way in which models write tool calls, described once for reading, writing and constraining."""

from __future__ import annotations

import abc
import json
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.serve.tools.tool_parser import CallRules, ToolParser


class Frame(NamedTuple):
    """What stands around calls whose arguments are JSON.

    opening, closing: around all calls.  separator: between two of them.
    before, after: around one call's arguments, with the function's name filled in.
    trigger: what stands before every call and nowhere else; "" if the whole answer is calls or has none.
    """

    opening: str
    before: str
    after: str
    separator: str
    closing: str
    trigger: str


class ToolFormat(abc.ABC):
    """A format. Stateless; ``parser`` makes a reader for one answer.

    name: as in ``--tool-parser``.
    markers: texts that tokenizers may hold as special tokens; they are kept in the text for the reader.
    template_marks: a chat template that holds one of them asks for this format.
    """

    name: str
    markers: tuple[str, ...] = ()
    template_marks: tuple[str, ...] = ()

    @abc.abstractmethod
    def parser(self, rules: CallRules) -> ToolParser:
        """A reader for one answer."""

    def new_call_id(self) -> str:
        """An id for a call, in the form that the format's templates take."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def frame(self, name: str) -> Frame | None:
        """What stands around calls of the function ``name``; None if arguments are not written as JSON."""
        return None

    def render(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """The text of calls, each a name and its arguments."""
        parts = []
        frame = Frame("", "", "", "", "", "")
        for name, arguments in calls:
            own = self.frame(name)
            assert own is not None, "a format without frames has its own render"
            frame = own
            parts.append(own.before + json.dumps(arguments, ensure_ascii=False) + own.after)
        return frame.opening + frame.separator.join(parts) + frame.closing


def quoted(name: str) -> str:
    """A name as a JSON string."""
    return json.dumps(name, ensure_ascii=False)
