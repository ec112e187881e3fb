"""ReasoningSplitter: parts what a model thinks, between tags, from what it says."""

from __future__ import annotations

from typing import NamedTuple

from headrace.serve.tools.events import Content, Event, Reasoning, merged
from headrace.serve.tools.text_reader import Machine, TextReader


class ReasoningTags(NamedTuple):
    """The tags around reasoning.

    starts_inside: the model never writes the first tag; it begins with reasoning.
    """

    start: str
    end: str
    starts_inside: bool = False


REASONING_PARSERS: dict[str, ReasoningTags] = {
    "think": ReasoningTags("<think>", "</think>"),
    "deepseek_r1": ReasoningTags("<think>", "</think>", starts_inside=True),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
}


def tags_of_template(source: str) -> ReasoningTags | None:
    """The tags that a chat template knows, or None."""
    for tags in REASONING_PARSERS.values():
        if tags.end in source or tags.start in source:
            return tags
    return None


class ReasoningSplitter:
    """Reads one answer. The tags, and the white space around them, belong to neither part.

    Args:
        is_inside: the answer begins with reasoning: the prompt ended with the first tag, or the model leaves it out.
    """

    def __init__(self, tags: ReasoningTags, is_inside: bool) -> None:
        self._tags = tags
        self._is_inside = is_inside
        self._reader = TextReader()
        self._events: list[Event] = []
        self._space = ""
        self._machine = self._run()

    def feed(self, text: str) -> list[Event]:
        """Take in more text; what is sure by now."""
        self._reader.push(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """The text is over."""
        self._reader.end()
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._machine, None)
        events, self._events = merged(self._events), []
        return events

    def _run(self) -> Machine[None]:
        tags = self._tags
        start = yield from self._reader.read_space()
        if (yield from self._reader.accept(tags.start)):
            start, self._is_inside = "", True
        if start:
            self._events.append(Reasoning(start) if self._is_inside else Content(start))
        if self._is_inside:
            yield from self._reader.skip_space()
            if not (yield from self._reader.until((tags.end,), self._think)):
                return
            yield from self._reader.skip_space()
        while char := (yield from self._reader.peek()):
            yield from self._reader.take()
            self._events.append(Content(char))

    def _think(self, text: str) -> None:
        """Reasoning, its white space held back until more of it follows."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._events.append(Reasoning(kept))
