"""Gemma: ``call:NAME{key:value,…}`` between marks, with strings between marks of their own instead of quotes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.serve.tools.json_text import MAX_DEPTH, Emit
from headrace.serve.tools.python_text import json_chars, python_value
from headrace.serve.tools.text_reader import Machine, Malformed
from headrace.serve.tools.tool_format import ToolFormat
from headrace.serve.tools.tool_parser import CallRules, ToolParser


class Marks(NamedTuple):
    """The marks of one generation of models: around a call, and on both sides of a string."""

    start: str
    end: str
    quote: str


FUNCTION_GEMMA = Marks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = Marks("<|tool_call>", "<tool_call|>", '<|"|>')


class GemmaFormat(ToolFormat):
    """FunctionGemma's marks, and Gemma 4's."""

    name = "gemma"
    markers = (*FUNCTION_GEMMA, *GEMMA4)
    template_marks = (FUNCTION_GEMMA.start, GEMMA4.start)

    def parser(self, rules: CallRules) -> ToolParser:
        """A reader for one answer."""
        return _GemmaParser(rules)

    def render(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """The text of calls, with FunctionGemma's marks."""
        return "".join(render_call(name, arguments, FUNCTION_GEMMA) for name, arguments in calls)


def render_call(name: str, arguments: dict[str, Any], marks: Marks) -> str:
    """The text of one call."""
    return f"{marks.start}call:{name}{_render(arguments, marks.quote)}{marks.end}"


def _render(value: Any, quote: str) -> str:
    match value:
        case str():
            return quote + value + quote
        case dict():
            return "{" + ",".join(f"{key}:{_render(item, quote)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ",".join(_render(item, quote) for item in value) + "]"
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


class _GemmaParser(ToolParser):
    def _parse(self) -> Machine[None]:
        starts = {marks.start: marks for marks in (FUNCTION_GEMMA, GEMMA4)}
        while start := (yield from self._content_until(*starts)):
            yield from self._attempt(self._marked(starts[start]), start)

    def _marked(self, marks: Marks) -> Machine[None]:
        call = self._new_call()
        yield from self._reader.expect("call:")
        name = yield from self._reader.read_name("{")
        call.set_name(name.strip())
        call.begin_arguments()
        yield from self._object(marks.quote, call.write, 0)
        call.end_arguments()
        yield from self._reader.skip_space()
        yield from self._reader.expect(marks.end)

    def _object(self, quote: str, emit: Emit, depth: int) -> Machine[None]:
        yield from self._reader.take()
        emit("{")
        keys: set[str] = set()
        while (yield from self._reader.skip_space()) != "}":
            key = yield from self._key(quote)
            if key in keys:
                raise Malformed(f"the key {key!r} is given twice")
            emit(f'{", " if keys else ""}"{json_chars(key)}": ')
            keys.add(key)
            yield from self._value(quote, emit, depth + 1)
            yield from self._comma("}")
        yield from self._reader.take()
        emit("}")

    def _key(self, quote: str) -> Machine[str]:
        if (yield from self._reader.accept(quote)):
            parts: list[str] = []
            yield from self._reader.until((quote,), parts.append)
            yield from self._reader.skip_space()
            yield from self._reader.expect(":")
            return "".join(parts)
        key = yield from self._reader.read_name(":")
        yield from self._reader.take()
        return key.strip().strip("\"'")

    def _value(self, quote: str, emit: Emit, depth: int) -> Machine[None]:
        if depth > MAX_DEPTH:
            raise Malformed(f"a value is nested deeper than {MAX_DEPTH} levels")
        char = yield from self._reader.skip_space()
        if char == "{":
            yield from self._object(quote, emit, depth)
        elif char == "[":
            yield from self._array(quote, emit, depth)
        elif (yield from self._reader.accept(quote)):
            emit('"')
            found = yield from self._reader.until((quote,), lambda text: emit(json_chars(text)))
            if not found:
                raise Malformed("a string does not end", "unfinished")
            emit('"')
        else:
            yield from python_value(self._reader, emit, depth)

    def _array(self, quote: str, emit: Emit, depth: int) -> Machine[None]:
        yield from self._reader.take()
        emit("[")
        is_first = True
        while (yield from self._reader.skip_space()) != "]":
            if not is_first:
                emit(", ")
            is_first = False
            yield from self._value(quote, emit, depth + 1)
            yield from self._comma("]")
        yield from self._reader.take()
        emit("]")

    def _comma(self, closing: str) -> Machine[None]:
        if (yield from self._reader.skip_space()) != closing:
            yield from self._reader.expect(",")
