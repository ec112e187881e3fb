"""ToolParser: what the readers of all formats share: events, the call being read, and what happens when it is none."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection
from dataclasses import dataclass

from headrace.serve.tools.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    ParseFailure,
    merged,
)
from headrace.serve.tools.text_reader import Machine, Malformed, TextReader


@dataclass(frozen=True)
class CallRules:
    """What a request says of calls.

    names: the functions there are.
    new_id: makes a call's id.
    max_calls: the answer ends behind so many calls (1 without parallel calls); None is any number.
    only_calls: calls are required, and the answer is constrained to them: what its end cuts off is no content.
    """

    names: Collection[str]
    new_id: Callable[[], str]
    max_calls: int | None = None
    only_calls: bool = False


class ToolParser(abc.ABC):
    """Reads one answer. Its events add up to the same answer however the text is cut.

    A format implements ``_parse``: content is read by ``_content_until``, a call inside ``_attempt``. A text that
    begins as a call and is none ends with a ``ParseFailure`` and is given as content, from its first character on.
    """

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._reader = TextReader()
        self._events: list[Event] = []
        self._num_calls = 0
        self._num_complete = 0
        self._call: Call | None = None
        self._opening = ""
        self._space: str | None = ""
        self._is_sure = True
        self._is_cut = False
        self._is_over = False
        self._machine = self._parse()

    @property
    def has_enough(self) -> bool:
        """True when there are as many calls as the rules allow."""
        return self._num_complete == self._rules.max_calls

    def feed(self, text: str) -> list[Event]:
        """Take in more text; what is sure by now."""
        if not self._is_over:
            self._reader.push(text)
            self._advance()
        return self._taken()

    def finish(self, is_cut: bool) -> list[Event]:
        """The text is over; ``is_cut`` when a limit ended it and not the model. Call it once."""
        if not self._is_over:
            self._is_cut = is_cut
            self._reader.end()
            self._advance()
        if self._space and not self._num_complete:
            self._events.append(Content(self._space))
        if self._rules.only_calls:  # what waited until now is the beginning of a call that was cut off
            self._events = [event for event in self._events if not isinstance(event, Content)]
        return self._taken()

    def _advance(self) -> None:
        try:
            next(self._machine)
        except (StopIteration, _EnoughCalls):
            self._is_over = True

    def _taken(self) -> list[Event]:
        events, self._events = merged(self._events), []
        return events

    # ---- for the formats

    @abc.abstractmethod
    def _parse(self) -> Machine[None]:
        """Read the whole answer."""

    def _content(self, text: str) -> None:
        """Give text to the user. White space before the first text, and around calls, waits: if a call or the end
        follows, it was layout."""
        if self._space is not None:
            self._space += text
            if not self._space.strip():
                return
            text, self._space = self._space, None
        if text:
            self._events.append(Content(text))

    def _content_until(self, *markers: str) -> Machine[str]:
        """Read content up to and over a marker; "" at the end of the answer."""
        return (yield from self._reader.until(markers, self._content))

    def _attempt(self, body: Machine[None], opening: str = "", is_sure: bool = True) -> Machine[bool]:
        """Read calls with ``body``; False if something was no call.

        Args:
            opening: the marker that was read before.
            is_sure: False where ordinary content may look like this, too; then it is no failure.
        """
        self._reader.start_record()
        self._opening, self._is_sure, self._call = opening, is_sure, None
        try:
            yield from body
        except Malformed as error:
            self._fail(error)
            return False
        return True

    def _new_call(self) -> Call:
        """Begin to read a call, inside ``_attempt``."""
        if self._call is not None:
            self._reader.start_record()
            self._opening = ""
        self._call = Call(self)
        return self._call

    def _fail(self, error: Malformed) -> None:
        call, is_end = self._call, error.code == "unfinished"
        is_announced = call is not None and call.index is not None
        if is_end and call is not None and (call.is_complete or (is_announced and self._is_cut)):
            return  # only the frame's end is missing; or finish_reason "length" says it all
        if self._is_sure and not (is_end and self._is_cut):
            index = call.index if call is not None and not call.is_complete else None
            self._events.append(ParseFailure(error.code, f"not a tool call: {error.message}", index))
        self._content(self._opening + self._reader.recorded())

    # ---- for Call

    def begin_call(self, name: str) -> int:
        """Announce a call; its index."""
        index = self._num_calls
        self._num_calls += 1
        self._space = ""
        self._events.append(CallStart(index, self._rules.new_id(), name))
        return index

    def write_arguments(self, index: int, text: str) -> None:
        """Pass on a piece of arguments."""
        self._events.append(CallArguments(index, text))

    def end_call(self, index: int) -> None:
        """A call is whole. Ends the parser when the rules allow no more."""
        self._events.append(CallEnd(index))
        self._num_complete += 1
        self._reader.start_record()
        self._opening = ""
        if self._num_complete == self._rules.max_calls:
            raise _EnoughCalls

    def check_name(self, name: str) -> None:
        """Raises Malformed "unknown_tool"."""
        if name not in self._rules.names:
            raise Malformed(f"there is no tool named {name[:100]!r}", "unknown_tool")


class Call:
    """A call that is being read. Its start is told once name and first argument are known, in whichever order."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._name: str | None = None
        self._early: list[str] = []
        self._has_arguments = False
        self._is_written = False
        self.index: int | None = None
        self.is_complete = False

    def set_name(self, name: str) -> None:
        """The function's name. Raises Malformed when there is none of that name, or a name already."""
        if self._name is not None:
            raise Malformed("a call has two names")
        self._parser.check_name(name)
        self._name = name
        if self._has_arguments:
            self._begin()
            if self._is_written:
                self._end()

    def begin_arguments(self) -> None:
        """Arguments follow. Raises Malformed if there were some."""
        if self._has_arguments:
            raise Malformed("a call has two objects of arguments")
        self._has_arguments = True

    def write(self, text: str) -> None:
        """A piece of the arguments' JSON object."""
        if self._name is None:
            self._early.append(text)
            return
        self._begin()
        if self.index is not None:
            self._parser.write_arguments(self.index, text)

    def end_arguments(self) -> None:
        """The object is whole."""
        self._is_written = True
        if self._name is not None:
            self._begin()
            self._end()

    def close(self) -> None:
        """The call's own frame is over. Raises Malformed if it had no name; without arguments it gets none."""
        if self._name is None:
            raise Malformed("a call has no name")
        if not self._has_arguments:
            self.begin_arguments()
            self.write("{}")
            self.end_arguments()

    def _begin(self) -> None:
        if self.index is None and self._name is not None:
            self.index = self._parser.begin_call(self._name)
            for text in self._early:
                self._parser.write_arguments(self.index, text)
            self._early.clear()

    def _end(self) -> None:
        if self.index is not None and not self.is_complete:
            self.is_complete = True
            self._parser.end_call(self.index)


class _EnoughCalls(Exception):
    """The answer has as many calls as the request allows."""
