"""From Anthropic's conversations to chat requests."""

from __future__ import annotations

import json
from typing import Any

from headrace.serve.errors import ApiError, bad_request
from headrace.serve.field_names import FieldNames
from headrace.serve.messages.protocol import (
    Block,
    CountRequest,
    Message,
    MessagesRequest,
    OutputFormat,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
)
from headrace.serve.protocol import ChatRequest

_NAMES = {
    "stop": "stop_sequences",
    "tools[*].function.parameters": "tools[*].input_schema",
    "tools[*].function": "tools[*]",
}
_PARAMS = {"chat_template_kwargs": "thinking", "parallel_tool_calls": "tool_choice"}

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def names_of(request: CountRequest) -> FieldNames:
    """What the fields of a chat request are called in this one."""
    form = "output_config.format" if request.output_format is None else "output_format"
    names = {"response_format.json_schema.schema": f"{form}.schema", "response_format": form}
    return FieldNames({**_NAMES, **names}, _PARAMS)


def chat_request(request: MessagesRequest) -> ChatRequest:
    """The same question as a chat request. Raises ApiError 400 for what cannot be asked here."""
    if request.container is not None:
        raise _error("container", "there are no containers here: leave it out")
    if request.temperature is not None and request.temperature > 1:
        raise _error("temperature", f"must be in [0, 1]; got {request.temperature}")
    chat = conversation(request)
    chat.max_tokens = request.max_tokens
    chat.temperature = request.temperature
    chat.top_p = request.top_p
    chat.top_k = request.top_k
    chat.stop = request.stop_sequences
    chat.stream = request.stream
    return chat


def conversation(request: CountRequest) -> ChatRequest:
    """The messages and tools as a chat request. Raises ApiError 400."""
    messages: list[dict[str, Any]] = []
    if request.system is not None:
        messages.append({"role": "system", "content": _text(request.system)})
    for index, message in enumerate(request.messages):
        messages += _turn(message, f"messages.{index}")
    continues = bool(request.messages) and request.messages[-1].role == "assistant"
    choice, parallel = _choice(request)
    return ChatRequest(
        messages=messages,
        model=request.model,
        tools=[_tool(tool) for tool in request.tools or []] or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        continue_final_message=continues,
        add_generation_prompt=not continues,
        chat_template_kwargs=_thinking(request),
        response_format=_response_format(request),
    )


def _response_format(request: CountRequest) -> dict[str, Any] | None:
    config, form = request.output_config, request.output_format
    if config is not None and config.effort is not None:
        raise _error("output_config.effort", "this model has no effort to set: leave it out")
    if config is not None and config.format is not None:
        if form is not None:
            raise _error("output_format", "output_config.format says it, too: send one of them")
        form = config.format
    return None if form is None else _json_schema(form)


def _json_schema(form: OutputFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema}}


def _thinking(request: CountRequest) -> dict[str, Any] | None:
    """Templates of models that can do both know ``enable_thinking``; others pass it over."""
    thinking = request.thinking
    if thinking is None:
        return None
    if thinking.budget_tokens is not None:
        raise _error("thinking.budget_tokens", "cannot be enforced by this server: use {'type': 'adaptive'}")
    if thinking.display not in (None, "summarized"):
        raise _error("thinking.display", "this server shows what the model thinks: leave it out")
    return {"enable_thinking": thinking.type != "disabled"}


def _choice(request: CountRequest) -> tuple[Any, bool | None]:
    """``tool_choice`` and ``parallel_tool_calls`` of the chat request."""
    choice = request.tool_choice
    if choice is None:
        return None, None
    parallel = False if choice.disable_parallel_tool_use else None
    if choice.type != "tool":
        return _CHOICES[choice.type], parallel
    if choice.name is None:
        raise _error("tool_choice.name", "is missing: name the tool")
    return {"type": "function", "function": {"name": choice.name}}, parallel


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _turn(message: Message, where: str) -> list[dict[str, Any]]:
    """One turn as chat messages: each result of a tool is a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    turn: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        path = f"{where}.content.{index}"
        if isinstance(block, ToolResultBlock):
            _check_side(message, "user", block, path)
            turn.append(_result(block))
        else:
            _add_block(turn, message, block, path)
    if not turn:
        raise _error(f"{where}.content", "is empty")
    return turn


def _add_block(turn: list[dict[str, Any]], message: Message, block: Block, path: str) -> None:
    """Put a block into the last message of this turn's own role."""
    if not turn or turn[-1]["role"] != message.role:
        turn.append({"role": message.role, "content": ""})
    own = turn[-1]
    match block:
        case TextBlock():
            own["content"] = f"{own['content']}\n{block.text}" if own["content"] else block.text
        case ThinkingBlock():
            _check_side(message, "assistant", block, path)
            own["reasoning_content"] = own.get("reasoning_content", "") + block.thinking
        case ToolUseBlock():
            _check_side(message, "assistant", block, path)
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            own.setdefault("tool_calls", []).append(
                {"id": block.id, "type": "function", "function": function}
            )


def _result(block: ToolResultBlock) -> dict[str, Any]:
    text = _text(block.content or "")
    if block.is_error:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _check_side(message: Message, role: str, block: Block, path: str) -> None:
    if message.role != role:
        kind = type(block).__struct_config__.tag
        raise _error(path, f"is a {kind} block in a message of the {message.role}; only the {role} has those")


def _error(where: str, problem: str) -> ApiError:
    return bad_request(f"{where}: {problem}", where)
