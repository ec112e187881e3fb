"""TextReader: text that arrives in pieces, read by a generator as if it were all there.

A parser is written as an ordinary recursive descent over ``peek`` and ``take``, each called with ``yield from``; the
generator rests whenever the text so far is used up. What it does can then not depend on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Machine = Generator[None, None, T]
"""A part of a parser: yields when it needs more text, returns a T."""

MAX_NAME_CHARS = 256
"""Of a function or an argument: what goes on for longer is text."""


class Malformed(Exception):
    """The text is not what the format says; ``code`` as in ``ParseFailure``."""

    def __init__(self, message: str, code: str = "invalid_syntax") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class TextReader:
    """A cursor over a growing text. Recorded text can be given back by ``recorded``."""

    def __init__(self) -> None:
        self._text = ""
        self._pos = 0
        self._is_ended = False
        self._record: list[str] = []
        self._record_start = 0

    def push(self, text: str) -> None:
        """Append text. What was read is dropped, so a piece costs only its own length."""
        self._record.append(self._text[self._record_start : self._pos])
        self._text = self._text[self._pos :] + text
        self._pos = self._record_start = 0

    def end(self) -> None:
        """No more text will come."""
        self._is_ended = True

    def start_record(self) -> None:
        """Record what is read from here."""
        self._record.clear()
        self._record_start = self._pos

    def recorded(self) -> str:
        """All that was read since ``start_record``."""
        return "".join(self._record) + self._text[self._record_start : self._pos]

    def peek(self) -> Machine[str]:
        """The next character, or "" at the end of all text."""
        while self._pos == len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._pos]

    def take(self) -> Machine[str]:
        """Read the next character. Raises Malformed "unfinished" at the end."""
        char = yield from self.peek()
        if not char:
            raise Malformed("the answer ended in the middle of it", "unfinished")
        self._pos += 1
        return char

    def skip_space(self) -> Machine[str]:
        """Read over white space; returns the character behind it, which is not read, or ""."""
        while True:
            char = yield from self.peek()
            if char not in (" ", "\n", "\t", "\r"):
                return char
            self._pos += 1

    def read_space(self) -> Machine[str]:
        """Read white space, and return it. Starts a record."""
        self.start_record()
        yield from self.skip_space()
        return self.recorded()

    def read_name(self, *stops: str) -> Machine[str]:
        """Read up to one of the characters ``stops``, which is not read. Raises Malformed after too many others."""
        name = ""
        while (yield from self.peek()) not in stops:
            name += yield from self.take()
            if len(name) > MAX_NAME_CHARS:
                raise Malformed(f"a name goes on for more than {MAX_NAME_CHARS} characters")
        return name

    def starts_with(self, text: str) -> Machine[bool]:
        """Whether the unread text starts with ``text``; reads nothing."""
        while True:
            have = self._text[self._pos : self._pos + len(text)]
            if have == text or not text.startswith(have):
                return have == text
            if self._is_ended:
                return False
            yield

    def accept(self, text: str) -> Machine[bool]:
        """Read ``text`` if it comes next."""
        found = yield from self.starts_with(text)
        if found:
            self._pos += len(text)
        return found

    def expect(self, text: str) -> Machine[None]:
        """Read ``text``. Raises Malformed at the first character that differs."""
        for wanted in text:
            char = yield from self.peek()
            if char and char != wanted:
                raise Malformed(f"expected {text!r}, found {char!r}")
            yield from self.take()

    def until(self, markers: tuple[str, ...], emit: Callable[[str], None]) -> Machine[str]:
        """Read up to and over the first of ``markers``, giving the text before it to ``emit``.

        No marker may be a part of another, nor may its end begin another.

        Returns: the marker, or "" at the end of all text.
        """
        while True:
            found = [(self._text.find(marker, self._pos), marker) for marker in markers]
            found = [(start, marker) for start, marker in found if start >= 0]
            if found:
                start, marker = min(found)
                if start > self._pos:
                    emit(self._text[self._pos : start])
                self._pos = start + len(marker)
                return marker
            end = len(self._text)
            if not self._is_ended:
                end -= _held_back(self._text, self._pos, markers)
            if end > self._pos:
                emit(self._text[self._pos : end])
                self._pos = end
            if self._is_ended:
                return ""
            yield


def _held_back(text: str, start: int, markers: tuple[str, ...]) -> int:
    """How many characters at the end may be the beginning of a marker."""
    most = min(len(text) - start, max(map(len, markers)) - 1)
    for size in range(most, 0, -1):
        tail = text[len(text) - size :]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0
