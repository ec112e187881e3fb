"""Hermes, Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` anywhere in the text."""

from __future__ import annotations

from headrace.serve.tools.call_object import call_object
from headrace.serve.tools.text_reader import Machine
from headrace.serve.tools.tool_format import Frame, ToolFormat, quoted
from headrace.serve.tools.tool_parser import CallRules, ToolParser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesFormat(ToolFormat):
    """The format of Hermes 2 Pro and later, of Qwen 2.5 and Qwen 3, and of models taught by a prompt."""

    name = "hermes"
    markers = (_OPEN, _CLOSE)
    template_marks = (_OPEN,)

    def parser(self, rules: CallRules) -> ToolParser:
        """A reader for one answer."""
        return _HermesParser(rules)

    def frame(self, name: str) -> Frame:
        """What stands around calls of the function ``name``."""
        before = f'{_OPEN}\n{{"name": {quoted(name)}, "arguments": '
        return Frame("", before, "}\n" + _CLOSE, "\n", "", _OPEN)


class _HermesParser(ToolParser):
    def _parse(self) -> Machine[None]:
        while (yield from self._content_until(_OPEN)):
            yield from self._attempt(self._tagged(), _OPEN)

    def _tagged(self) -> Machine[None]:
        call = self._new_call()
        yield from self._reader.skip_space()
        yield from call_object(self._reader, call)
        yield from self._reader.skip_space()
        yield from self._reader.expect(_CLOSE)
