"""Python's literals read a character at a time and passed on as JSON."""

from __future__ import annotations

import json
import re

from headrace.serve.tools.json_text import MAX_DEPTH, Emit
from headrace.serve.tools.text_reader import Machine, Malformed, TextReader

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_CODE_DIGITS = {"x": 2, "u": 4, "U": 8}
_SURROGATE = re.compile("[\ud800-\udfff]")
_NUMBER_CHARS = frozenset("0123456789.eE+-")


def python_value(reader: TextReader, emit: Emit, depth: int = 0) -> Machine[None]:
    """Read a string, number, True, False, None, list, tuple or dict of such. Raises Malformed."""
    if depth > MAX_DEPTH:
        raise Malformed(f"a value is nested deeper than {MAX_DEPTH} levels")
    char = yield from reader.skip_space()
    if char in ("'", '"'):
        emit('"')
        yield from python_string(reader, lambda text: emit(json_chars(text)))
        emit('"')
    elif char == "[":
        yield from _sequence(reader, emit, "]", depth)
    elif char == "(":
        yield from _sequence(reader, emit, ")", depth)
    elif char == "{":
        yield from _dict(reader, emit, depth)
    elif char.isalpha():
        word = yield from python_word(reader)
        if word not in _WORDS:
            raise Malformed(f"{word!r} is no literal")
        emit(_WORDS[word])
    else:
        emit((yield from python_number(reader)))


def python_word(reader: TextReader) -> Machine[str]:
    """Read letters, digits and underscores."""
    word = ""
    while True:
        char = yield from reader.peek()
        if not char or not (char.isalnum() or char == "_"):
            return word
        word += yield from reader.take()


def python_number(reader: TextReader) -> Machine[str]:
    """Read a number; as JSON. Raises Malformed."""
    text = ""
    while (yield from reader.peek()) in _NUMBER_CHARS:
        text += yield from reader.take()
    if not text:
        char = yield from reader.take()  # tells of the end
        raise Malformed(f"expected a value, found {char!r}")
    try:
        number = json.loads(_json_number(text))
    except ValueError:
        number = None
    if not isinstance(number, int | float):
        raise Malformed(f"{text[:40]!r} is no number")
    return _json_number(text)


def _json_number(text: str) -> str:
    """Python's ``+1``, ``.5`` and ``1.`` are not JSON."""
    sign = "-" if text[0] == "-" else ""
    text = text.lstrip("+-") if text[0] in "+-" else text
    whole, dot, rest = text.partition(".")
    if dot and not whole:
        whole = "0"
    if dot and not rest[:1].isdigit():
        rest = "0" + rest
    return sign + whole + dot + rest


def json_chars(text: str) -> str:
    """Characters as they stand inside a JSON string."""
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    return _SURROGATE.sub(lambda found: json.dumps(found[0])[1:-1], escaped)


def python_string(reader: TextReader, emit: Emit) -> Machine[None]:
    """Read a string in either kind of quotes, emitting what it stands for. Line breaks inside are taken as they are."""
    quote = yield from reader.take()
    while True:
        char = yield from reader.take()
        if char == quote:
            return
        if char == "\\":
            char = yield from _escape(reader)
        emit(char)


def _escape(reader: TextReader) -> Machine[str]:
    char = yield from reader.take()
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char not in _CODE_DIGITS:
        return "\\" + char  # as Python has it
    digits = ""
    for _ in range(_CODE_DIGITS[char]):
        digits += yield from reader.take()
    try:
        return chr(int(digits, 16))
    except (ValueError, OverflowError):
        raise Malformed(f"'\\{char}{digits}' is no character") from None


def _sequence(reader: TextReader, emit: Emit, closing: str, depth: int) -> Machine[None]:
    yield from reader.take()
    emit("[")
    is_first = True
    while (yield from reader.skip_space()) != closing:
        if not is_first:
            emit(", ")
        is_first = False
        yield from python_value(reader, emit, depth + 1)
        yield from _comma(reader, closing)
    yield from reader.take()
    emit("]")


def _dict(reader: TextReader, emit: Emit, depth: int) -> Machine[None]:
    yield from reader.take()
    emit("{")
    is_first = True
    while (char := (yield from reader.skip_space())) != "}":
        if not is_first:
            emit(", ")
        is_first = False
        if char not in ("'", '"'):
            yield from reader.take()
            raise Malformed("the keys of a dict must be strings")
        yield from python_value(reader, emit, depth + 1)
        yield from reader.skip_space()
        yield from reader.expect(":")
        emit(": ")
        yield from python_value(reader, emit, depth + 1)
        yield from _comma(reader, "}")
    yield from reader.take()
    emit("}")


def _comma(reader: TextReader, closing: str) -> Machine[None]:
    """Read the comma behind an item; the last one may lack it."""
    if (yield from reader.skip_space()) != closing:
        yield from reader.expect(",")
