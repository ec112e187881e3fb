"""DeepSeek: calls between marks of their own, with arguments in a fence (V3, R1) or bare (V3.1)."""

from __future__ import annotations

from headrace.serve.tools.call_object import call_arguments
from headrace.serve.tools.text_reader import Machine
from headrace.serve.tools.tool_format import Frame, ToolFormat
from headrace.serve.tools.tool_parser import Call, CallRules, ToolParser

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"


class DeepSeekFormat(ToolFormat):
    """``function<｜tool▁sep｜>NAME`` and a fence, or ``NAME<｜tool▁sep｜>{…}``: both are read, the first is written."""

    name = "deepseek"
    markers = (_CALLS, _CALLS_END, _CALL, _SEP, _CALL_END)
    template_marks = (_CALLS,)

    def parser(self, rules: CallRules) -> ToolParser:
        """A reader for one answer."""
        return _DeepSeekParser(rules)

    def frame(self, name: str) -> Frame:
        """What stands around calls of the function ``name``."""
        before = f"{_CALL}function{_SEP}{name}\n{_FENCE}json\n"
        return Frame(_CALLS, before, f"\n{_FENCE}{_CALL_END}", "\n", _CALLS_END, _CALLS)


class _DeepSeekParser(ToolParser):
    def _parse(self) -> Machine[None]:
        while (yield from self._content_until(_CALLS)):
            yield from self._attempt(self._calls(), _CALLS)

    def _calls(self) -> Machine[None]:
        while True:
            yield from self._reader.skip_space()
            if (yield from self._reader.accept(_CALLS_END)):
                return
            call = self._new_call()
            yield from self._reader.expect(_CALL)
            yield from self._one(call)

    def _one(self, call: Call) -> Machine[None]:
        head = yield from self._reader.read_name("<")
        yield from self._reader.expect(_SEP)
        if (yield from self._reader.skip_space()) == "{":
            call.set_name(head.strip())
            yield from call_arguments(self._reader, call)
        else:
            call.set_name((yield from self._reader.read_name("\n")).strip())
            yield from self._reader.skip_space()
            yield from self._reader.expect(_FENCE + "json")
            yield from self._reader.skip_space()
            yield from call_arguments(self._reader, call)
            yield from self._reader.skip_space()
            yield from self._reader.expect(_FENCE)
        yield from self._reader.skip_space()
        yield from self._reader.expect(_CALL_END)
