"""Bodies of /v1/messages. Fields are Anthropic's; unknown ones are refused, as its API does.

What is typed ``Any`` and not read changes no answer here: caching hints, metadata, tiers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class TextBlock(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Text of either side."""

    text: str
    cache_control: Any = None
    citations: Any = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """What the model thought in an earlier turn."""

    thinking: str
    signature: Any = None


class ToolUseBlock(
    msgspec.Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True, kw_only=True
):
    """A call in an earlier turn."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None
    toolset_name: Any = None


class ToolResultBlock(
    msgspec.Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True, kw_only=True
):
    """What a tool gave back; ``is_error`` when it failed."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None
    toolset_name: Any = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn. A last turn of the assistant is gone on with."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A function of the client. Tools that run on Anthropic's servers have another ``type`` and are refused."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    input_examples: Any = None
    eager_input_streaming: Any = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How tools are used; ``name`` with type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Whether the model thinks first; a budget cannot be enforced and is refused."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the text of the answer must be."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How the answer is written."""

    format: OutputFormat | None = None
    effort: Any = None


class CountRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[Message]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: Any = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # what output_config.format was while it was a beta


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages. ``top_k`` apart, sampling fields are as in OpenAI's API."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Any = None
    service_tier: Any = None
    container: Any = None
    inference_geo: Any = None
