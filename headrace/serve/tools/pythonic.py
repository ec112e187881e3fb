"""Pythonic calls: the whole answer is a list ``[f(a=1), g(b="x")]``, or Python code in a fence named ``tool_code``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.serve.tools.python_text import json_chars, python_value
from headrace.serve.tools.text_reader import MAX_NAME_CHARS, Machine, Malformed
from headrace.serve.tools.tool_format import ToolFormat
from headrace.serve.tools.tool_parser import Call, CallRules, ToolParser

_START, _END = "<|python_start|>", "<|python_end|>"
_FENCE, _FENCE_END = "```tool_code", "```"


class PythonicFormat(ToolFormat):
    """The list of Llama 3.2 and Llama 4. A list of anything else is content. Positional arguments are refused."""

    name = "pythonic"
    markers = (_START, _END)
    template_marks = ("[func_name1(params_name1=", _START)

    def parser(self, rules: CallRules) -> ToolParser:
        """A reader for one answer."""
        return _PythonicParser(rules)

    def render(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """The text of calls."""
        return "[" + ", ".join(_code(name, arguments) for name, arguments in calls) + "]"


class ToolCodeFormat(ToolFormat):
    """What Gemma 3 is asked for: calls in a fence, one a line or in a list, with or without ``print(…)``."""

    name = "tool_code"
    template_marks = (_FENCE, "tool_code")

    def parser(self, rules: CallRules) -> ToolParser:
        """A reader for one answer."""
        return _ToolCodeParser(rules)

    def render(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """The text of calls."""
        lines = [_code(name, arguments) for name, arguments in calls]
        return "\n".join([_FENCE, *lines, _FENCE_END])


def _code(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


class _PythonicParser(ToolParser):
    def _parse(self) -> Machine[None]:
        self._content((yield from self._reader.read_space()))
        if (yield from self._reader.peek()) == "[":
            yield from self._attempt(self._list(), is_sure=False)
        while (yield from self._content_until(_START)):
            yield from self._attempt(self._marked(), _START)

    def _marked(self) -> Machine[None]:
        yield from self._reader.skip_space()
        yield from self._list()
        yield from self._reader.skip_space()
        yield from self._reader.expect(_END)

    def _list(self) -> Machine[None]:
        yield from self._reader.expect("[")
        yield from self._calls("]")
        yield from self._reader.expect("]")

    def _calls(self, closing: str) -> Machine[None]:
        while True:
            call = self._new_call()
            yield from self._reader.skip_space()
            yield from self._one(call)
            if (yield from self._reader.skip_space()) == closing:
                return
            yield from self._reader.expect(",")

    def _one(self, call: Call) -> Machine[None]:
        yield from self._called(call, (yield from self._name()))

    def _called(self, call: Call, name: str) -> Machine[None]:
        """Read what follows a function's name."""
        yield from self._reader.expect("(")
        self._is_sure = True
        call.set_name(name)
        call.begin_arguments()
        yield from self._arguments(call)
        yield from self._reader.take()
        call.write("}")
        call.end_arguments()

    def _name(self) -> Machine[str]:
        name = ""
        while True:
            char = yield from self._reader.peek()
            if not char or not (char.isalnum() or char in "_.-:/") or len(name) > MAX_NAME_CHARS:
                break
            name += yield from self._reader.take()
        if not name:
            char = yield from self._reader.take()  # tells of the end
            raise Malformed(f"expected a function's name, found {char!r}")
        return name

    def _arguments(self, call: Call) -> Machine[None]:
        """Read up to the closing parenthesis."""
        keys: set[str] = set()
        before = "{"
        while (char := (yield from self._reader.skip_space())) != ")":
            key = yield from self._key(char)
            if key in keys:
                raise Malformed(f"the argument {key!r} is given twice")
            keys.add(key)
            call.write(f'{before}"{json_chars(key)}": ')
            before = ", "
            yield from python_value(self._reader, call.write)
            if (yield from self._reader.skip_space()) != ")":
                yield from self._reader.expect(",")
        if not keys:
            call.write("{")

    def _key(self, char: str) -> Machine[str]:
        if char and not (char.isalpha() or char == "_"):
            raise Malformed("arguments must be given by name")
        key = yield from self._name()
        yield from self._reader.skip_space()
        yield from self._reader.expect("=")
        return key


class _ToolCodeParser(_PythonicParser):
    def _parse(self) -> Machine[None]:
        while (yield from self._content_until(_FENCE)):
            yield from self._attempt(self._fenced(), _FENCE)

    def _fenced(self) -> Machine[None]:
        if (yield from self._reader.skip_space()) == "[":
            yield from self._list()
        else:
            yield from self._lines()
        yield from self._reader.skip_space()
        yield from self._reader.expect(_FENCE_END)

    def _lines(self) -> Machine[None]:
        while True:
            call = self._new_call()
            name = yield from self._name()
            if name == "print":
                yield from self._reader.expect("(")
                yield from self._one(call)
                yield from self._reader.skip_space()
                yield from self._reader.expect(")")
            else:
                yield from self._called(call, name)
            if (yield from self._reader.skip_space()) in ("`", ""):
                return
