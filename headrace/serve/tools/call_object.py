"""A tool call written as a JSON object with name and arguments, as several formats have it."""

from __future__ import annotations

import json
from collections.abc import Callable

from headrace.serve.tools.json_text import decoded_string, json_escape, json_object, json_value
from headrace.serve.tools.text_reader import Machine, Malformed, TextReader
from headrace.serve.tools.tool_parser import Call

_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")


def call_object(reader: TextReader, call: Call, on_key: Callable[[str], None] | None = None) -> Machine[None]:
    """Read ``{"name": …, "arguments": {…}}``, in any order of keys; keys of other names are passed over.

    Args:
        on_key: told of each key before its value is read; may raise Malformed.

    Raises: Malformed.
    """
    yield from reader.expect("{")
    char = yield from reader.skip_space()
    while char != "}":
        key = yield from decoded_string(reader)
        if on_key is not None:
            on_key(key)
        yield from reader.skip_space()
        yield from reader.expect(":")
        char = yield from reader.skip_space()
        if key in _NAME_KEYS and char == '"':
            call.set_name((yield from decoded_string(reader)))
        elif key in _ARGUMENT_KEYS:
            yield from call_arguments(reader, call)
        else:
            yield from json_value(reader, _nowhere)
        char = yield from reader.skip_space()
        if char == "}":
            break
        yield from reader.expect(",")
        yield from reader.skip_space()
    call.close()
    yield from reader.expect("}")


def call_arguments(reader: TextReader, call: Call) -> Machine[None]:
    """Read a call's arguments: an object, an object in a string, or null for none. Raises Malformed."""
    char = yield from reader.peek()
    call.begin_arguments()
    if char == "{":
        yield from json_object(reader, call.write)
        call.end_arguments()
    elif char == '"':
        yield from _object_in_string(_Unquoted(reader), call)
    elif char == "n":
        yield from reader.expect("null")
        call.write("{}")
        call.end_arguments()
    else:
        yield from reader.take()  # tells of the end
        raise Malformed(f"arguments must be a JSON object; found {char!r}")


def _object_in_string(inner: _Unquoted, call: Call) -> Machine[None]:
    yield from inner.skip_space()
    yield from json_object(inner, call.write)
    call.end_arguments()
    if (yield from inner.skip_space()):
        raise Malformed("the arguments' string goes on behind their object")


def _nowhere(text: str) -> None:
    """Where the values of other keys go."""


class _Unquoted(TextReader):
    """The text inside a JSON string, read as if it stood there without quotes and escapes."""

    def __init__(self, outer: TextReader) -> None:
        super().__init__()
        self._outer = outer
        self._ahead: str | None = None
        self._is_open = False

    def peek(self) -> Machine[str]:
        """The next character inside the string, or "" at its end."""
        if self._ahead is None:
            self._ahead = yield from self._next()
        return self._ahead

    def take(self) -> Machine[str]:
        """Read it. Raises Malformed at the string's end."""
        char = yield from self.peek()
        if not char:
            raise Malformed("the arguments' string ends before their object does")
        self._ahead = None
        return char

    def _next(self) -> Machine[str]:
        if not self._is_open:
            yield from self._outer.expect('"')
            self._is_open = True
        char = yield from self._outer.take()
        if char == '"':
            return ""
        if char != "\\":
            return char
        escape = yield from json_escape(self._outer)
        text: str = json.loads(f'"{escape}"')
        return text

    def accept(self, text: str) -> Machine[bool]:
        """Read a single character if it comes next."""
        found = (yield from self.peek()) == text
        if found:
            yield from self.take()
        return found

    def skip_space(self) -> Machine[str]:
        """Read over white space."""
        while (yield from self.peek()) in (" ", "\n", "\t", "\r"):
            yield from self.take()
        return (yield from self.peek())
