"""Chat messages as clients send them -> plain dicts with text content, as templates expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import RequestError

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_PART_FIELDS = ("type", "cache_control", "annotations", "logprobs", "prompt_cache_breakpoint")


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages, with content parts joined to one text and tool arguments parsed.

    Raises:
        RequestError: no messages, one without a role, or content that is not text.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("'messages' must be a list with at least one message", param="messages")
    return [_normalise_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalise_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is not an object with 'role' and 'content'", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}: 'role' is {role!r}, not a non-empty string", param="messages")
    plain = dict(message)
    content = plain.get("content")
    if content is None:
        # An assistant's turn may hold only tool calls; templates join texts, so it gets an empty one.
        if role != "assistant":
            raise RequestError(f"{where}: 'content' is missing", param="messages")
        plain["content"] = ""
    elif not isinstance(content, str):
        plain["content"] = _join_parts(content, where)
    if plain.get("tool_calls"):
        plain["tool_calls"] = _with_parsed_arguments(plain["tool_calls"], where)
    else:
        plain.pop("tool_calls", None)
    return plain


def _join_parts(content: Any, where: str) -> str:
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise RequestError(f"{where}: 'content' is neither a text nor a list of parts", param="messages")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        text = None if field is None else part.get(field)
        if not isinstance(text, str):
            raise RequestError(
                f"{where}.content[{index}] is a part of type {kind!r}; this model takes text parts only "
                '({"type": "text", "text": "…"})',
                param="messages",
            )
        for name in part:
            if name not in (*_PART_FIELDS, field):
                raise RequestError(
                    f"{where}.content[{index}] has an unknown field {str(name)!r:.100}: leave it out",
                    param="messages",
                )
        texts.append(text)
    return "\n".join(texts)


def _with_parsed_arguments(calls: Any, where: str) -> list[Any]:
    """Templates print a call's arguments as an object, while the API sends them as a JSON string."""
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise RequestError(f"{where}: 'tool_calls' is not a list", param="messages")
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RequestError(f"{where}: a tool call has no 'function' object", param="messages")
        parsed.append({**call, "function": {**function, "arguments": _parse(function.get("arguments"))}})
    return parsed


def _parse(arguments: Any) -> Any:
    """An object if the string holds one; else as it came, since a model may have written broken JSON earlier."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
