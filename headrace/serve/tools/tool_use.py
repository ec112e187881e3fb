"""ToolUse: what a request says of tools, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.serve.body import refuse_unknown
from headrace.serve.errors import bad_request

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_./:-]{1,128}")
_MODES = ("none", "auto", "required")
_CHOICES = "'none', 'auto', 'required', {'type': 'function', 'function': {'name': …}} or {'type': 'allowed_tools', …}"

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class FunctionTool:
    """A function that the model may call.

    parameters: the JSON Schema of its arguments, always of type object.
    is_strict: arguments must match it; the model is not able to write others.
    given: the tool as the request has it, for the chat template.
    """

    name: str
    parameters: dict[str, Any]
    is_strict: bool
    given: Mapping[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request and how they are to be used.

    tools: all of them: what the model is told of.
    allowed: those that it may call, by ``tool_choice``.
    mode: "none": no call; "auto": as the model likes; "required": one call at least.
    is_single: no more than one call: one function is named, or parallel calls are off.
    """

    tools: Sequence[FunctionTool]
    allowed: Sequence[FunctionTool]
    mode: Mode
    is_single: bool

    @property
    def is_constrained(self) -> bool:
        """Whether the answer's tokens are constrained."""
        return self.mode == "required" or (
            self.mode == "auto" and any(tool.is_strict for tool in self.allowed)
        )


def tool_use_of(tools: Any, choice: Any, parallel: Any) -> ToolUse | None:
    """Check ``tools``, ``tool_choice`` and ``parallel_tool_calls``; None when there are no tools.

    Raises: ApiError 400.
    """
    known = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or [])]
    if len(known) > MAX_TOOLS:
        raise bad_request(f"tools has {len(known)} entries; at most {MAX_TOOLS} are allowed", "tools")
    by_name = {tool.name: tool for tool in known}
    if len(by_name) != len(known):
        raise bad_request("tools has two functions of one name; names must differ", "tools")
    if parallel is not None and not isinstance(parallel, bool):
        raise bad_request("parallel_tool_calls must be true or false", "parallel_tool_calls")
    mode, allowed, is_named = _choice(choice, by_name)
    if not known:
        if mode == "required":
            raise bad_request(
                "tool_choice asks for a call, but there are no tools: send tools, too", "tool_choice"
            )
        return None
    return ToolUse(known, allowed, mode, is_named or parallel is False)


def _tool(tool: Any, where: str) -> FunctionTool:
    if not isinstance(tool, Mapping):
        raise bad_request(f"{where} must be an object", "tools")
    if tool.get("type") != "function":
        raise bad_request(f"{where}.type is {tool.get('type')!r}; this server knows 'function' only", "tools")
    refuse_unknown(tool, ("type", "function", "cache_control"), where)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise bad_request(f"{where}.function must be an object with a name", "tools")
    refuse_unknown(function, ("name", "description", "parameters", "strict"), f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(
            f"{where}.function.name must be 1 to 128 letters, digits or any of _ - . / : in ASCII; got {name!r:.100}",
            "tools",
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise bad_request(f"{where}.function.description must be a string", "tools")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise bad_request(f"{where}.function.strict must be true or false", "tools")
    return FunctionTool(name, _parameters(function.get("parameters"), where), bool(strict), tool)


def _parameters(schema: Any, where: str) -> dict[str, Any]:
    if schema is None:
        return {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise bad_request(f"{where}.function.parameters must be a JSON Schema, which is an object", "tools")
    kind = schema.get("type", "object")
    if kind != "object":
        raise bad_request(
            f"{where}.function.parameters.type is {kind!r:.100}; it must be 'object': arguments have names",
            "tools",
        )
    return {"type": "object", **schema}


def _choice(choice: Any, tools: Mapping[str, FunctionTool]) -> tuple[Mode, list[FunctionTool], bool]:
    """The mode, the functions that may be called, and whether one of them is named."""
    every = list(tools.values())
    if choice is None:
        return "auto", every, False
    if isinstance(choice, str) and choice in _MODES:
        return choice, every, False  # type: ignore[return-value]  # one of the modes
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return "required", [_named(choice, tools)], True
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        refuse_unknown(choice, ("type", "allowed_tools"), "tool_choice")
        rules = choice.get("allowed_tools")
        if isinstance(rules, Mapping):
            refuse_unknown(rules, ("mode", "tools"), "tool_choice.allowed_tools")
        names = rules.get("tools") if isinstance(rules, Mapping) else None
        mode = rules.get("mode") if isinstance(rules, Mapping) else None
        if isinstance(names, list) and names and mode in ("auto", "required"):
            return mode, [_named(name, tools) for name in names], False
    raise bad_request(f"tool_choice must be {_CHOICES}; got {choice!r:.100}", "tool_choice")


def _named(choice: Any, tools: Mapping[str, FunctionTool]) -> FunctionTool:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not isinstance(function, Mapping):
        raise bad_request(f"tool_choice must be {_CHOICES}; got {choice!r:.100}", "tool_choice")
    refuse_unknown(choice, ("type", "function"), "tool_choice")
    refuse_unknown(function, ("name",), "tool_choice.function")
    if name not in tools:
        known = ", ".join(tools) or "none"
        raise bad_request(
            f"tool_choice names {name!r:.100}, which is not in tools (there: {known:.300})", "tool_choice"
        )
    return tools[name]
