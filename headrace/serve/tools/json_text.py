"""JSON read by the character and passed on as it is. Strict, but that control characters in strings are escaped."""

from __future__ import annotations

import json
from collections.abc import Callable

from headrace.serve.tools.text_reader import Machine, Malformed, TextReader

Emit = Callable[[str], None]

MAX_DEPTH = 64
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = frozenset("0123456789")
_LITERALS = {"t": "true", "f": "false", "n": "null"}


def json_value(reader: TextReader, emit: Emit, depth: int = 0) -> Machine[None]:
    """Read one value and emit its text without the white space between its parts' ends and what follows.

    Raises: Malformed.
    """
    char = yield from reader.peek()
    if char == "{":
        yield from json_object(reader, emit, depth)
    elif char == "[":
        yield from _array(reader, emit, depth)
    elif char == '"':
        yield from json_string(reader, emit)
    elif char == "-" or char in _DIGITS:
        yield from _number(reader, emit)
    elif char in _LITERALS:
        yield from reader.expect(_LITERALS[char])
        emit(_LITERALS[char])
    else:
        yield from reader.take()  # tells of the end
        raise Malformed(f"expected a JSON value, found {char!r}")


def json_object(reader: TextReader, emit: Emit, depth: int = 0) -> Machine[None]:
    """Read an object. Raises Malformed."""
    yield from _open(reader, emit, "{", depth)
    if (yield from _space(reader, emit)) != "}":
        while True:
            if (yield from _space(reader, emit)) != '"':
                raise Malformed("expected a key in double quotes", (yield from _code_here(reader)))
            yield from json_string(reader, emit)
            yield from _space(reader, emit)
            yield from reader.expect(":")
            emit(":")
            yield from _space(reader, emit)
            yield from json_value(reader, emit, depth + 1)
            if (yield from _next_item(reader, emit, "}")) == "}":
                return
    yield from reader.expect("}")
    emit("}")


def _array(reader: TextReader, emit: Emit, depth: int) -> Machine[None]:
    yield from _open(reader, emit, "[", depth)
    if (yield from _space(reader, emit)) != "]":
        while True:
            yield from _space(reader, emit)
            yield from json_value(reader, emit, depth + 1)
            if (yield from _next_item(reader, emit, "]")) == "]":
                return
    yield from reader.expect("]")
    emit("]")


def _open(reader: TextReader, emit: Emit, bracket: str, depth: int) -> Machine[None]:
    if depth >= MAX_DEPTH:
        raise Malformed(f"JSON is nested deeper than {MAX_DEPTH} levels")
    yield from reader.expect(bracket)
    emit(bracket)


def _next_item(reader: TextReader, emit: Emit, closing: str) -> Machine[str]:
    """Read a comma or the closing bracket."""
    yield from _space(reader, emit)
    char = yield from reader.peek()
    if char and char not in (",", closing):
        raise Malformed(f"expected ',' or {closing!r}, found {char!r}")
    yield from reader.take()
    emit(char)
    return char


def _space(reader: TextReader, emit: Emit) -> Machine[str]:
    while True:
        char = yield from reader.peek()
        if char not in (" ", "\n", "\t", "\r"):
            return char
        emit((yield from reader.take()))


def _code_here(reader: TextReader) -> Machine[str]:
    return "invalid_syntax" if (yield from reader.peek()) else "unfinished"


def json_string(reader: TextReader, emit: Emit) -> Machine[None]:
    """Read a string with its quotes. Models put line breaks into strings as they are: those come out escaped."""
    yield from reader.expect('"')
    emit('"')
    while True:
        char = yield from reader.take()
        if char == "\\":
            emit((yield from json_escape(reader)))
        elif char < " " or "\ud800" <= char <= "\udfff":  # a surrogate comes from an escape inside an escape
            emit(json.dumps(char)[1:-1])
        else:
            emit(char)
            if char == '"':
                return


def json_escape(reader: TextReader) -> Machine[str]:
    """Read the rest of an escape whose backslash was read; returns all of it."""
    char = yield from reader.take()
    if char in _ESCAPES:
        return "\\" + char
    if char != "u":
        raise Malformed(f"'\\{char}' is no escape of JSON")
    digits = ""
    for _ in range(4):
        digit = yield from reader.take()
        if digit not in _HEX:
            raise Malformed("'\\u' needs four hexadecimal digits")
        digits += digit
    return "\\u" + digits


def decoded_string(reader: TextReader) -> Machine[str]:
    """Read a string; returns what it stands for."""
    parts: list[str] = []
    yield from json_string(reader, parts.append)
    text: str = json.loads("".join(parts))
    return text


def _number(reader: TextReader, emit: Emit) -> Machine[None]:
    if (yield from reader.accept("-")):
        emit("-")
    if (yield from reader.accept("0")):
        emit("0")
        if (yield from reader.peek()) in _DIGITS:
            raise Malformed("a number must not begin with 0")
    else:
        yield from _digits(reader, emit)
    if (yield from reader.accept(".")):
        emit(".")
        yield from _digits(reader, emit)
    if (yield from reader.peek()) in ("e", "E"):
        emit((yield from reader.take()))
        if (yield from reader.peek()) in ("+", "-"):
            emit((yield from reader.take()))
        yield from _digits(reader, emit)


def _digits(reader: TextReader, emit: Emit) -> Machine[None]:
    char = yield from reader.take()
    if char not in _DIGITS:
        raise Malformed(f"expected a digit, found {char!r}")
    emit(char)
    while (yield from reader.peek()) in _DIGITS:
        emit((yield from reader.take()))
