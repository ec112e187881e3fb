"""What an answer with tools or reasoning may be, as a structural tag: calls that the model cannot get wrong, in its own
format, and free thought before them."""

from __future__ import annotations

import json
from typing import Any

from headrace.serve.errors import bad_request
from headrace.serve.tools.reasoning import ReasoningTags
from headrace.serve.tools.tool_format import Frame, ToolFormat
from headrace.serve.tools.tool_use import FunctionTool, ToolUse
from headrace.structured_outputs import StructuredOutputsParams

Format = dict[str, Any]
_ANY_OBJECT = {"type": "object"}


def constrained_params(
    use: ToolUse | None,
    form: ToolFormat,
    thought: ReasoningTags | None,
    wanted: StructuredOutputsParams | None,
) -> StructuredOutputsParams | None:
    """The constraint that a request comes to; None if its answer is free.

    Required and named calls are the whole answer and match their schemas. In free text only calls are constrained:
    those of strict functions by their schema, others to a JSON object. With a constraint on the text, an answer is
    calls or such a text.

    Args:
        use: the tools that may be called; None without any.
        thought: the answer begins inside these tags; what stands there is free.
        wanted: what the request says of the text.

    Raises: ApiError 400 for what cannot be constrained together, and for formats whose arguments are not JSON.
    """
    if use is None and thought is None:
        return wanted
    if wanted is not None and use is not None and use.mode == "required":
        raise bad_request(
            "tool_choice asks for a call, which is then the whole answer, and structured_outputs says what its text "
            "must be: send one of them",
            "structured_outputs",
        )
    text = None if wanted is None else _text_format(wanted)
    if use is not None and use.mode == "required":
        whole: Format | None = _calls(use, _frames(use, form))
    elif use is not None and text is not None:
        whole = {"type": "or", "elements": [_calls(use, _frames(use, form)), text]}
    elif use is not None and use.is_constrained:
        whole = _text_with_calls(use, _frames(use, form))
    else:
        whole = text
    if whole is None:
        return None
    if thought is not None:
        before = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": thought.end}
        whole = _sequence([before, {"type": "regex", "pattern": r"\s{0,2}"}, whole])
    return StructuredOutputsParams(
        structural_tag={"type": "structural_tag", "format": whole},
        disable_any_whitespace=wanted is not None and wanted.disable_any_whitespace,
        backend=None if wanted is None else wanted.backend,
    )


def _text_format(wanted: StructuredOutputsParams) -> Format:
    """A constraint on the whole text as a part of a structural tag."""
    if wanted.json is not None:
        schema = json.loads(wanted.json) if isinstance(wanted.json, str) else wanted.json
        return {"type": "json_schema", "json_schema": schema}
    if wanted.json_object:
        return {"type": "json_schema", "json_schema": _ANY_OBJECT}
    if wanted.regex is not None:
        return {"type": "regex", "pattern": wanted.regex}
    if wanted.choice is not None:
        return {"type": "or", "elements": [_const(text) for text in wanted.choice]}
    raise bad_request(
        "a grammar or structural tag cannot be had together with tools or reasoning: leave it out, or set tool_choice "
        "to 'none' and the server's --reasoning-parser to none",
        "structured_outputs",
        code="unsupported_value",
    )


def _frames(use: ToolUse, form: ToolFormat) -> list[Frame]:
    frames = [form.frame(tool.name) for tool in use.allowed]
    known = [frame for frame in frames if frame is not None]
    if len(known) < len(frames):
        raise bad_request(
            f"the tool format {form.name!r} writes arguments in a language of its own, which cannot be constrained: "
            "use tool_choice 'auto' without strict functions, or start the server with another --tool-parser",
            "tool_choice",
            code="unsupported_value",
        )
    return known


def _calls(use: ToolUse, frames: list[Frame]) -> Format:
    """One call at least, and nothing else."""
    is_strict = use.mode == "required"
    calls = {
        "type": "tags_with_separator",
        "tags": [
            _tag(tool, frame.before, frame.after, is_strict or tool.is_strict)
            for tool, frame in zip(use.allowed, frames, strict=True)
        ],
        "separator": frames[0].separator,
        "at_least_one": True,
        "stop_after_first": use.is_single,
    }
    opening, closing = frames[0].opening, frames[0].closing
    return _sequence([*_consts(opening), calls, *_consts(closing)])


def _text_with_calls(use: ToolUse, frames: list[Frame]) -> Format:
    """Free text, in which a call's first mark starts one."""
    trigger = frames[0].trigger
    if not trigger:
        # The whole answer is calls, or it starts otherwise.
        text = {"type": "regex", "pattern": r"(\s*[^\s{](.|\n)*)?"}
        return {"type": "or", "elements": [_calls(use, frames), text]}
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": [
            _tag(tool, frame.opening + frame.before, frame.after + frame.closing, tool.is_strict)
            for tool, frame in zip(use.allowed, frames, strict=True)
        ],
        "at_least_one": False,
        "stop_after_first": use.is_single,
    }


def _tag(tool: FunctionTool, begin: str, end: str, is_strict: bool) -> Format:
    schema = tool.parameters if is_strict else _ANY_OBJECT
    return {
        "type": "tag",
        "begin": begin,
        "content": {"type": "json_schema", "json_schema": schema},
        "end": end,
    }


def _sequence(elements: list[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _consts(text: str) -> list[Format]:
    return [_const(text)] if text else []


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}
