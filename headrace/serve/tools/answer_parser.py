"""AnswerParser: one answer from text to reasoning, content and calls."""

from __future__ import annotations

from headrace.serve.tools.events import Content, Event, merged
from headrace.serve.tools.reasoning import ReasoningSplitter
from headrace.serve.tools.tool_parser import ToolParser


class AnswerParser:
    """Reasoning is split off first; what is left is read for calls. Either part may be missing."""

    def __init__(self, reasoning: ReasoningSplitter | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def has_enough(self) -> bool:
        """True when the answer is over whatever follows: it has as many calls as it may."""
        return self._tools is not None and self._tools.has_enough

    def feed(self, text: str) -> list[Event]:
        """Take in more text; what is sure by now."""
        found: list[Event] = [Content(text)] if text else []
        if self._reasoning is not None:
            found = self._reasoning.feed(text)
        return self._read(found)

    def finish(self, is_cut: bool) -> list[Event]:
        """The text is over; ``is_cut`` when a limit ended it. Call it once."""
        events = self._read(self._reasoning.finish()) if self._reasoning is not None else []
        if self._tools is not None:
            events += self._tools.finish(is_cut)
        return merged(events)

    def _read(self, found: list[Event]) -> list[Event]:
        if self._tools is None:
            return found
        events: list[Event] = []
        for event in found:
            if isinstance(event, Content):
                events += self._tools.feed(event.text)
            else:
                events.append(event)
        return merged(events)
