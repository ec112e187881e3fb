"""ParsedStream: one answer's outputs, whole or in parts, read into events, with the reason of its end."""

from __future__ import annotations

from headrace.outputs import CompletionOutput
from headrace.serve.tools.answer_parser import AnswerParser
from headrace.serve.tools.events import CallEnd, Event


class ParsedStream:
    """Feeds a parser. A whole answer is a stream of one part.

    finish_reason: OpenAI's: "tool_calls" when a call is complete and no limit cut the answer; None while it runs.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._has_calls = False
        self.finish_reason: str | None = None

    def read(self, answer: CompletionOutput) -> list[Event]:
        """The events in an output's text, and those of its end if it is the last."""
        events = self._parser.feed(answer.text)
        reason = answer.finish_reason
        if reason is not None:
            events += self._parser.finish(is_cut=reason != "stop")
        self._has_calls = self._has_calls or any(isinstance(event, CallEnd) for event in events)
        is_over = reason == "stop" or (reason == "length" and self._parser.has_enough)
        self.finish_reason = "tool_calls" if self._has_calls and is_over else reason
        return events
