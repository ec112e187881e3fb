"""ChatPlan: how one conversation is put to the model, and how its answer is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.engine.prompts import ParsedPrompt
from headrace.sampling_params import SamplingParams
from headrace.serve.cache_control import without_controls
from headrace.serve.errors import bad_request
from headrace.serve.protocol import ChatRequest
from headrace.serve.settings import ServerConfig
from headrace.serve.tools.answer_parser import AnswerParser
from headrace.serve.tools.constraint import constrained_params
from headrace.serve.tools.default_prompt import with_tools_in_words
from headrace.serve.tools.reasoning import (
    REASONING_PARSERS,
    ReasoningSplitter,
    ReasoningTags,
    tags_of_template,
)
from headrace.serve.tools.registry import DEFAULT_FORMAT, FORMATS, automatic_format, knows_tools
from headrace.serve.tools.tool_format import ToolFormat
from headrace.serve.tools.tool_parser import CallRules
from headrace.serve.tools.tool_use import ToolUse, tool_use_of
from headrace.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatPlan:
    """What a template, the server's settings and a request come to.

    use: the request's tools; None without any.
    form: how calls are written.
    is_native: the chat template knows tools; else they are put in words.
    takes_system: the template accepts a system message.
    tags: around reasoning; None where the model has none.
    keeps_special_tokens: marks of calls or reasoning are special tokens, which must stay in the text to be read.
    """

    use: ToolUse | None
    form: ToolFormat
    is_native: bool
    takes_system: bool
    tags: ReasoningTags | None
    keeps_special_tokens: bool

    @property
    def _reads_calls(self) -> bool:
        return self.use is not None and self.use.mode != "none"

    def put(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools for the chat template. Raises RequestError for malformed messages."""
        given = [dict(tool.given) for tool in self.use.tools] if self._reads_calls and self.use else []
        messages, tools = without_controls(messages), without_controls(given)
        if self.is_native:
            return messages, tools or None
        return with_tools_in_words(messages, tools, self.form, self.takes_system), None

    def adjust(self, params: SamplingParams, prompt: ParsedPrompt) -> None:
        """Set what reading the answer needs, and what the answer may be. Raises ApiError 400, RequestError."""
        if self.keeps_special_tokens:
            params.skip_special_tokens = False
        thought = self.tags if self.tags is not None and self._starts_inside(self.tags, prompt) else None
        use = self.use if self._reads_calls else None
        params.structured_outputs = constrained_params(use, self.form, thought, params.structured_outputs)
        params.verify()  # once more: what does not go with a constraint does not go with this one either

    @property
    def is_plain(self) -> bool:
        """True when the whole text is content."""
        return not self._reads_calls and self.tags is None

    def new_parser(self, prompt: ParsedPrompt) -> AnswerParser:
        """A reader for one answer to ``prompt``."""
        reasoning = tools = None
        if self.tags is not None:
            reasoning = ReasoningSplitter(self.tags, self._starts_inside(self.tags, prompt))
        if self._reads_calls and self.use is not None:
            names = [tool.name for tool in self.use.allowed]
            rules = CallRules(
                names,
                self.form.new_call_id,
                max_calls=1 if self.use.is_single else None,
                only_calls=self.use.mode == "required",
            )
            tools = self.form.parser(rules)
        return AnswerParser(reasoning, tools)

    def _starts_inside(self, tags: ReasoningTags, prompt: ParsedPrompt) -> bool:
        return tags.starts_inside or (prompt.text or "").rstrip().endswith(tags.start)


def plan_chat(request: ChatRequest, tokenizer: Tokenizer, config: ServerConfig) -> ChatPlan:
    """Plan one request. Raises ApiError 400."""
    use = tool_use_of(request.tools, request.tool_choice, request.parallel_tool_calls)
    has_tools = use is not None and use.mode != "none"
    source = request.chat_template or tokenizer.template_source(has_tools) or ""
    is_native = knows_tools(source)
    form = _format(config, source, has_tools)
    tags = _tags(config, source)
    marks = set(form.markers if has_tools else ()) | set(tags[:2] if tags else ())
    keeps = any(tokenizer.is_special_text(mark) for mark in marks)
    if keeps and request.skip_special_tokens:
        raise bad_request(
            "skip_special_tokens: this model marks tool calls or reasoning by special tokens; leave the field out",
            "skip_special_tokens",
            code="unsupported_value",
        )
    return ChatPlan(use, form, is_native, _takes_system(source), tags, keeps)


def _format(config: ServerConfig, source: str, has_tools: bool) -> ToolFormat:
    if config.tool_parser != "auto":
        return FORMATS[config.tool_parser]
    found = automatic_format(source)
    if found is None and has_tools:
        raise bad_request(
            "tools: the chat template has tools, but in which format the model writes calls is not known; start the "
            f"server with --tool-parser and one of {', '.join(FORMATS)}",
            "tools",
            code="unknown_tool_format",
        )
    return found or FORMATS[DEFAULT_FORMAT]


def _tags(config: ServerConfig, source: str) -> ReasoningTags | None:
    if config.reasoning_parser == "auto":
        return tags_of_template(source)
    return REASONING_PARSERS.get(config.reasoning_parser)


def _takes_system(source: str) -> bool:
    """Templates that raise an error for a system message either say so, or never speak of one and check roles."""
    lowered = source.lower()
    if "system role not supported" in lowered:
        return False
    return "system" in lowered or "raise_exception" not in lowered
