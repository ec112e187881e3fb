"""What a reader finds in an answer's text, in order; and the answer that the events add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text from between the reasoning tags."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its arguments follow. ``index`` counts the calls of one answer from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON object of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments are a whole JSON object now."""

    index: int


@dataclass(frozen=True, slots=True)
class ParseFailure:
    """A text that began as a tool call and is none; the text follows as content.

    code: "invalid_syntax", "unknown_tool" or "unfinished".
    index: of the call if it had begun; its arguments stay cut off.
    """

    code: str
    message: str
    index: int | None = None


Event = Content | Reasoning | CallStart | CallArguments | CallEnd | ParseFailure


def merged(events: Iterable[Event]) -> list[Event]:
    """The events with neighbouring pieces of one text joined."""
    result: list[Event] = []
    pieces: list[str] = []
    last: Event | None = None

    def close() -> None:
        if isinstance(last, Content | Reasoning):
            result.append(type(last)("".join(pieces)))
        elif isinstance(last, CallArguments):
            result.append(CallArguments(last.index, "".join(pieces)))

    for event in events:
        is_text = isinstance(event, Content | Reasoning | CallArguments)
        if not is_text or type(event) is not type(last):
            close()
            pieces, last = [], None
        if isinstance(event, Content | Reasoning | CallArguments):
            pieces.append(event.text)
            last = event
        else:
            result.append(event)
    close()
    return result


@dataclass(slots=True)
class ParsedCall:
    """One call; ``is_complete`` when its arguments are a whole JSON object."""

    call_id: str
    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass(slots=True)
class ParsedAnswer:
    """The sum of an answer's events."""

    reasoning: str = ""
    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)
    failures: list[ParseFailure] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Take in more events."""
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(_, call_id, name):
                    self.calls.append(ParsedCall(call_id, name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
                case CallEnd(index):
                    self.calls[index].is_complete = True
                case ParseFailure():
                    self.failures.append(event)
