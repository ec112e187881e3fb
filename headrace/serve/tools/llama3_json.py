"""Llama 3: the whole answer is ``{"name": …, "parameters": {…}}``, several parted by semicolons."""

from __future__ import annotations

from headrace.serve.tools.call_object import call_object
from headrace.serve.tools.text_reader import Machine, Malformed
from headrace.serve.tools.tool_format import Frame, ToolFormat, quoted
from headrace.serve.tools.tool_parser import CallRules, ToolParser

_TAG = "<|python_tag|>"
_CALL_KEYS = frozenset({"name", "function", "type", "id", "arguments", "parameters"})


class Llama3JsonFormat(ToolFormat):
    """The JSON format of Llama 3.1 and 3.2, with or without ``<|python_tag|>``.

    An answer that starts with another JSON object is content.
    """

    name = "llama3_json"
    markers = (_TAG,)
    template_marks = (_TAG, '"parameters": dictionary of argument name')

    def parser(self, rules: CallRules) -> ToolParser:
        """A reader for one answer."""
        return _Llama3JsonParser(rules)

    def frame(self, name: str) -> Frame:
        """What stands around calls of the function ``name``."""
        return Frame("", f'{{"name": {quoted(name)}, "parameters": ', "}", "; ", "", "")


class _Llama3JsonParser(ToolParser):
    def _parse(self) -> Machine[None]:
        self._content((yield from self._reader.read_space()))
        if (yield from self._reader.peek()) == "{":
            yield from self._attempt(self._calls(), is_sure=False)
        while (yield from self._content_until(_TAG)):
            yield from self._attempt(self._calls(), _TAG)

    def _calls(self) -> Machine[None]:
        while True:
            call = self._new_call()
            yield from self._reader.skip_space()
            yield from call_object(self._reader, call, self._on_key)
            if (yield from self._reader.skip_space()) not in (";", ","):
                return
            yield from self._reader.take()

    def _on_key(self, key: str) -> None:
        if not self._is_sure and key not in _CALL_KEYS:
            raise Malformed(f"{key!r} is no key of a call")
        if key in ("name", "function"):
            self._is_sure = True
