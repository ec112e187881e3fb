"""Fields that would change an answer in a way that this server cannot: refused by name, unless they ask for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.serve.errors import ApiError
from headrace.serve.protocol import ChatRequest, GenerationRequest

_Check = Callable[[Any], bool]


def _is_off(value: Any) -> bool:
    return not value


# field -> (does this value ask for nothing, what to say)
_TOOLS = "this form of tool calling is not supported: use tools and tool_choice"
_FIELDS: dict[str, tuple[_Check, str]] = {
    "suffix": (_is_off, "this model cannot fill text in before a suffix: leave the field out"),
    "functions": (_is_off, _TOOLS),
    "function_call": (lambda value: value in ("none", "auto"), _TOOLS),
    "modalities": (lambda value: value == ["text"], "this model answers in text only: leave the field out"),
    "audio": (_is_off, "this model answers in text only: leave the field out"),
    "reasoning_effort": (
        lambda value: value == "none",
        "this model has no reasoning effort to set: leave the field out",
    ),
    "verbosity": (lambda value: value == "medium", "this model has no verbosity to set: leave the field out"),
    "web_search_options": (lambda value: False, "this server cannot search the web: leave the field out"),
}


def refuse_unsupported(request: GenerationRequest) -> None:
    """Raises ApiError 400 naming the first field that cannot be honoured."""
    for name, (asks_nothing, message) in _FIELDS.items():
        value = getattr(request, name, None)
        if value is not None and not asks_nothing(value):
            raise ApiError(400, f"{name}: {message}", param=name, code="unsupported_field")
    if isinstance(request, ChatRequest) and request.echo:
        raise ApiError(
            400,
            "echo: chat answers do not repeat the last message; use continue_final_message and join them",
            param="echo",
            code="unsupported_field",
        )
    if request.stream_options is not None and not request.stream:
        raise ApiError(
            400,
            "stream_options is only allowed when stream is true",
            param="stream_options",
            code="invalid_value",
        )
    for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
        if not request.use_beam_search and getattr(request, name) not in (None, neutral):
            raise ApiError(
                400,
                f"{name}: it only means something for beam search: leave the field out, or set use_beam_search",
                param=name,
                code="unsupported_field",
            )
    if request.stream and request.use_beam_search:
        raise ApiError(400, "beam search cannot be streamed", param="use_beam_search", code="invalid_value")
    if request.stream and request.best_of not in (None, request.n or 1):
        raise ApiError(400, "best_of answers cannot be streamed", param="best_of", code="invalid_value")
