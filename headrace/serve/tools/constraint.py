"""The structural tag that a request for tools comes to: calls that the model cannot get wrong, in its own format."""

from __future__ import annotations

from typing import Any

from headrace.serve.errors import ApiError
from headrace.serve.tools.reasoning import ReasoningTags
from headrace.serve.tools.tool_format import Frame, ToolFormat
from headrace.serve.tools.tool_use import FunctionTool, ToolUse

_ANY_OBJECT = {"type": "object"}


def structural_tag(use: ToolUse, form: ToolFormat, reasoning: ReasoningTags | None) -> dict[str, Any]:
    """A structural tag for ``use``, which is constrained.

    Required calls, and named ones, are the whole answer and always match their schemas. In free text only calls are
    constrained: those of strict functions by their schema, others to a JSON object.

    Args:
        reasoning: the answer begins inside these tags; what is between them is free.

    Raises: ApiError 400 for a format whose arguments are not JSON.
    """
    frames = [_frame(tool, form) for tool in use.allowed]
    whole = _calls(use, frames) if use.mode == "required" else _text_with_calls(use, frames)
    if reasoning is not None:
        thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": reasoning.end}
        whole = {"type": "sequence", "elements": [thought, {"type": "regex", "pattern": r"\s{0,2}"}, whole]}
    return {"type": "structural_tag", "format": whole}


def _frame(tool: FunctionTool, form: ToolFormat) -> Frame:
    frame = form.frame(tool.name)
    if frame is None:
        raise ApiError(
            400,
            f"the tool format {form.name!r} writes arguments in a language of its own, which cannot be constrained: "
            "use tool_choice 'auto' without strict functions, or start the server with another --tool-parser",
            param="tool_choice",
            code="unsupported_value",
        )
    return frame


def _calls(use: ToolUse, frames: list[Frame]) -> dict[str, Any]:
    """One call at least, and nothing else."""
    tags = [
        _tag(tool, frame.before, frame.after, True) for tool, frame in zip(use.allowed, frames, strict=True)
    ]
    frame = frames[0]
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": frame.separator,
        "at_least_one": True,
        "stop_after_first": use.is_single,
    }
    around = [frame.opening, calls, frame.closing]
    elements = [{"type": "const_string", "value": x} if isinstance(x, str) else x for x in around if x]
    return {"type": "sequence", "elements": elements}


def _text_with_calls(use: ToolUse, frames: list[Frame]) -> dict[str, Any]:
    """Free text, in which a call's first mark starts one."""
    tags = [
        _tag(tool, frame.opening + frame.before, frame.after + frame.closing, tool.is_strict)
        for tool, frame in zip(use.allowed, frames, strict=True)
    ]
    trigger = frames[0].trigger
    if not trigger:
        # The whole answer is calls, or it starts otherwise.
        text = {"type": "regex", "pattern": r"[^\s{](.|\n)*"}
        return {"type": "or", "elements": [_calls(use, frames), text]}
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": use.is_single,
    }


def _tag(tool: FunctionTool, begin: str, end: str, is_strict: bool) -> dict[str, Any]:
    schema = tool.parameters if is_strict else _ANY_OBJECT
    return {
        "type": "tag",
        "begin": begin,
        "content": {"type": "json_schema", "json_schema": schema},
        "end": end,
    }
