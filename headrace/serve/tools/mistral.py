"""Mistral: ``[TOOL_CALLS]`` before a list of JSON calls, or, in newer models, before each call's name and arguments."""

from __future__ import annotations

import secrets
import string

from headrace.serve.tools.call_object import call_arguments, call_object
from headrace.serve.tools.text_reader import Machine
from headrace.serve.tools.tool_format import Frame, ToolFormat, quoted
from headrace.serve.tools.tool_parser import CallRules, ToolParser

_MARK, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_CHARS = string.ascii_letters + string.digits


class MistralFormat(ToolFormat):
    """Both formats are read. Calls have ids of nine letters or digits, which Mistral's templates insist on."""

    name = "mistral"
    markers = (_MARK, _ARGS, _ID)
    template_marks = (_MARK,)

    def parser(self, rules: CallRules) -> ToolParser:
        """A reader for one answer."""
        return _MistralParser(rules)

    def new_call_id(self) -> str:
        """Nine letters or digits."""
        return "".join(secrets.choice(_ID_CHARS) for _ in range(9))

    def frame(self, name: str) -> Frame:
        """What stands around calls of the function ``name``: the list."""
        return Frame(_MARK + "[", f'{{"name": {quoted(name)}, "arguments": ', "}", ", ", "]", _MARK)


class _MistralParser(ToolParser):
    def _parse(self) -> Machine[None]:
        while (yield from self._content_until(_MARK)):
            yield from self._attempt(self._calls(), _MARK)

    def _calls(self) -> Machine[None]:
        if (yield from self._reader.skip_space()) == "[":
            yield from self._list()
        else:
            yield from self._named()

    def _list(self) -> Machine[None]:
        yield from self._reader.expect("[")
        while True:
            call = self._new_call()
            yield from self._reader.skip_space()
            yield from call_object(self._reader, call)
            if (yield from self._reader.skip_space()) == "]":
                yield from self._reader.take()
                return
            yield from self._reader.expect(",")

    def _named(self) -> Machine[None]:
        call = self._new_call()
        call.set_name((yield from self._reader.read_name("{", "[")).strip())
        if (yield from self._reader.accept(_ID)):
            while (yield from self._reader.peek()) not in ("{", "["):
                yield from self._reader.take()  # the model's own id, which we do not use
        if (yield from self._reader.peek()) == "[":
            yield from self._reader.expect(_ARGS)
            yield from self._reader.skip_space()
        yield from call_arguments(self._reader, call)
