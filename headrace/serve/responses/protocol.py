"""Bodies of /v1/responses. Fields are OpenAI's; unknown ones are refused, as its API does.

What is typed ``Any`` and not read in ``convert`` changes no answer here.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.serve.protocol import StreamOptions


class InputText(msgspec.Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    """Text of the user, the system or a tool."""

    text: str
    prompt_cache_breakpoint: Any = None


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    """Text of an earlier answer."""

    text: str
    annotations: Any = None
    logprobs: Any = None


class Refusal(msgspec.Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """A refusal in an earlier answer."""

    refusal: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text", forbid_unknown_fields=True):
    """What the model thought in an earlier answer."""

    text: str


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A function of the client. OpenAI's own tools have another ``type`` and are refused."""

    type: Literal["function"]
    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    allowed_callers: Any = None


class NamedTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A function by its name."""

    type: Literal["function"]
    name: str


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The functions that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What the text must be."""

    format: dict[str, Any] | None = None
    verbosity: Any = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    """How hard to think; models here have no such setting."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses. ``input`` is checked in ``convert``: items need no type of their own."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    store: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    max_tool_calls: Any = None
