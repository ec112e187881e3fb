"""The items of a request's ``input`` as chat messages."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.serve.body import decode_value
from headrace.serve.errors import bad_request
from headrace.serve.responses.protocol import InputText, OutputText, ReasoningText, Refusal, ResponsesRequest

Part = InputText | OutputText | Refusal


class MessageItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message of either side; ``type`` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    type: str | None = None
    id: Any = None
    status: Any = None
    phase: Any = None


class CallItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A call that the model made."""

    type: str
    call_id: str
    name: str
    arguments: str
    id: Any = None
    status: Any = None
    caller: Any = None


class ResultItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a function gave back."""

    type: str
    call_id: str
    output: str | list[InputText]
    id: Any = None
    status: Any = None
    caller: Any = None


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the model thought; it belongs to the message or call that follows."""

    type: str
    content: list[ReasoningText] | None = None
    summary: Any = None
    id: Any = None
    encrypted_content: Any = None
    status: Any = None


_KINDS: dict[Any, type[msgspec.Struct]] = {
    None: MessageItem,
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
    "reasoning": ReasoningItem,
}


def messages_of(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Instructions and input as chat messages. Raises ApiError 400."""
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        raise bad_request("input is empty: send a text or at least one item", "input")
    thought = ""
    for index, value in enumerate(request.input):
        item = _item(value, f"input[{index}]")
        if isinstance(item, ReasoningItem):
            thought += "".join(part.text for part in item.content or [])
            continue
        _add(messages, item)
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    if not messages:
        raise bad_request("input has neither a message nor a call: send one", "input")
    return messages


def _item(value: dict[str, Any], where: str) -> msgspec.Struct:
    kind = value.get("type")
    known = _KINDS.get(kind) if kind is None or isinstance(kind, str) else None
    if known is None:
        names = ", ".join(str(name) for name in _KINDS if name)
        raise bad_request(f"{where}.type is {kind!r:.100}; this server takes {names}", "input")
    return decode_value(value, known, where)


def _add(messages: list[dict[str, Any]], item: msgspec.Struct) -> None:
    """Calls join the assistant's message before them, as chat has it."""
    match item:
        case MessageItem():
            messages.append({"role": item.role, "content": _text(item.content)})
        case CallItem():
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        case ResultItem():
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})


def _text(content: str | list[Part] | list[InputText]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)
