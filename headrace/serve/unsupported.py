"""Fields that would change an answer in a way that this server cannot: refused by name, unless they ask for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.serve.errors import bad_request
from headrace.serve.protocol import ChatRequest, GenerationRequest

# field -> (does this value ask for nothing, what to say)
FieldChecks = dict[str, tuple[Callable[[Any], bool], str]]


def refuse_fields(request: object, checks: FieldChecks) -> None:
    """Raises ApiError 400 naming the first field that asks for something."""
    for name, (asks_nothing, message) in checks.items():
        value = getattr(request, name, None)
        if value is not None and not asks_nothing(value):
            raise bad_request(f"{name}: {message}", name, code="unsupported_field")


def _is_off(value: Any) -> bool:
    return not value


_TOOLS = "this form of tool calling is not supported: use tools and tool_choice"
_FIELDS: FieldChecks = {
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
    refuse_fields(request, _FIELDS)
    if isinstance(request, ChatRequest) and request.echo:
        raise bad_request(
            "echo: chat answers do not repeat the last message; use continue_final_message and join them",
            "echo",
            code="unsupported_field",
        )
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only allowed when stream is true", "stream_options")
    for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
        if not request.use_beam_search and getattr(request, name) not in (None, neutral):
            raise bad_request(
                f"{name}: it only means something for beam search: leave the field out, or set use_beam_search",
                name,
                code="unsupported_field",
            )
    if request.stream and request.use_beam_search:
        raise bad_request(
            "use_beam_search: a search has all its answers at the end, so it cannot be streamed: leave stream out, or "
            "use_beam_search",
            "use_beam_search",
        )
    if request.stream and request.best_of not in (None, request.n or 1):
        raise bad_request(
            f"best_of: {request.best_of} answers are ranked at their ends, so they cannot be streamed: leave stream "
            "out, or set best_of to n",
            "best_of",
        )
