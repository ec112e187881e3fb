"""The formats by name, and which of them a chat template asks for."""

from __future__ import annotations

import re

from headrace.serve.tools.deepseek import DeepSeekFormat
from headrace.serve.tools.gemma import GemmaFormat
from headrace.serve.tools.hermes import HermesFormat
from headrace.serve.tools.llama3_json import Llama3JsonFormat
from headrace.serve.tools.mistral import MistralFormat
from headrace.serve.tools.pythonic import PythonicFormat, ToolCodeFormat
from headrace.serve.tools.tool_format import ToolFormat

# In the order in which a template is searched for their marks: the first that is found counts.
_ALL: tuple[ToolFormat, ...] = (
    DeepSeekFormat(),
    MistralFormat(),
    GemmaFormat(),
    PythonicFormat(),
    HermesFormat(),
    Llama3JsonFormat(),
    ToolCodeFormat(),
)
FORMATS: dict[str, ToolFormat] = {form.name: form for form in _ALL}
DEFAULT_FORMAT = "hermes"
"""Of models whose template knows no tools: they are put in words."""

_KNOWS_TOOLS = re.compile(r"\btools\b")


def knows_tools(source: str) -> bool:
    """Whether a chat template does something with tools."""
    return _KNOWS_TOOLS.search(source) is not None


def automatic_format(source: str) -> ToolFormat | None:
    """What ``--tool-parser auto`` comes to for a chat template; None: it has tools, but the format is not known."""
    return format_of_template(source) if knows_tools(source) else FORMATS[DEFAULT_FORMAT]


def format_of_template(source: str) -> ToolFormat | None:
    """The format whose marks stand in a chat template, or None."""
    for form in _ALL:
        if any(mark in source for mark in form.template_marks):
            return form
    return None
