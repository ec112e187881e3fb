"""From requests of the responses API to chat requests."""

from __future__ import annotations

from typing import Any

from headrace.serve.body import decode_value
from headrace.serve.errors import bad_request
from headrace.serve.field_names import FieldNames
from headrace.serve.protocol import ChatRequest
from headrace.serve.responses.items import messages_of
from headrace.serve.responses.protocol import AllowedTools, FunctionTool, NamedTool, ResponsesRequest
from headrace.serve.unsupported import FieldChecks, refuse_fields

_STATELESS = "this server keeps no responses: send the whole conversation as input"

_UNSUPPORTED: FieldChecks = {
    "previous_response_id": (lambda value: False, _STATELESS),
    "conversation": (lambda value: False, _STATELESS),
    "prompt": (lambda value: False, "this server has no stored prompts: send the text as input"),
    "background": (lambda value: not value, "answers are not computed in the background here: leave it out"),
    "truncation": (
        lambda value: value == "disabled",
        "input is never cut here: leave it out and send what fits",
    ),
    "top_logprobs": (lambda value: value == 0, "use /v1/chat/completions for log-probabilities"),
    "include": (
        lambda value: all(name == "reasoning.encrypted_content" for name in value),
        "this server has nothing to include but reasoning, which is always there",
    ),
}


# What the fields of a chat request are called here.
NAMES = FieldNames(
    {
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "verbosity": "text.verbosity",
        "tools[*].function": "tools[*]",
        "messages[*].content": "input",
        "messages[*]": "input",
        "messages": "input",
    }
)


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """The same question as a chat request. Raises ApiError 400 for what cannot be asked here."""
    refuse_fields(request, _UNSUPPORTED)
    reasoning = request.reasoning
    if reasoning is not None and reasoning.effort not in (None, "none"):
        raise bad_request(
            "reasoning.effort: this model has no reasoning effort to set: leave it out",
            "reasoning",
            code="unsupported_field",
        )
    return ChatRequest(
        messages=messages_of(request),
        model=request.model,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stream=request.stream,
        tools=[_tool(tool) for tool in request.tools or []] or None,
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request),
        verbosity=request.text.verbosity if request.text is not None else None,
    )


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    for name in ("description", "parameters", "strict"):
        value = getattr(tool, name)
        if value is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    """Here a function is named beside its type, in chat inside an object of its own."""
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return _named(decode_value(choice, NamedTool, "tool_choice"))
    if kind == "allowed_tools":
        allowed = decode_value(choice, AllowedTools, "tool_choice")
        tools = [_named(tool) for tool in allowed.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": allowed.mode, "tools": tools}}
    raise bad_request(
        "tool_choice must be 'none', 'auto', 'required', {'type': 'function', 'name': …} or {'type': 'allowed_tools', "
        f"…}}; got {choice!r:.100}",
        "tool_choice",
    )


def _named(choice: NamedTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    form = request.text.format if request.text is not None else None
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {key: form[key] for key in form if key != "type"}}
