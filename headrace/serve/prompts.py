"""The prompts of a request, brought to token ids or to text that the engine will tokenize."""

from __future__ import annotations

import re
from typing import Any

from headrace.engine.front_end import FrontEnd
from headrace.engine.prompts import ParsedPrompt
from headrace.errors import RequestError
from headrace.serve.body import refuse_unknown
from headrace.serve.chat_plan import ChatPlan
from headrace.serve.context import tokenizer_of
from headrace.serve.errors import bad_request
from headrace.serve.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from headrace.tokenizer import Tokenizer

MAX_PROMPTS = 2048
_FORMS = "a string, a list of strings, a list of token ids or a list of such lists"
_OWN_VARIABLES = (
    "messages",
    "chat_template",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
)
# Those that change no prompt, and those that every template knows or that become text before it sees them.
_MESSAGE_FIELDS = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "refusal",
    "annotations",
    "cache_control",
    "tool_parse_errors",
)
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def completion_prompts(request: CompletionRequest, front_end: FrontEnd) -> list[ParsedPrompt]:
    """One prompt or a batch, each text or token ids. Raises ApiError 400, RequestError."""
    items = _split(request.prompt)
    salt = request.cache_salt or ""
    return [_completion_prompt(item, request.add_special_tokens, salt, front_end) for item in items]


def _split(prompt: Any) -> list[Any]:
    if prompt is None:
        raise bad_request(f"prompt is missing; it must be {_FORMS}", "prompt", code="missing_field")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise bad_request(f"prompt must be {_FORMS}", "prompt", code="invalid_type")
    if not prompt:
        raise bad_request(f"prompt is an empty list; it must be {_FORMS}", "prompt")
    if type(prompt[0]) is int:
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} are allowed", "prompt")
    return prompt


def _completion_prompt(
    item: Any, add_special_tokens: bool | None, salt: str, front_end: FrontEnd
) -> ParsedPrompt:
    if isinstance(item, str):
        refuse_hopeless(item, front_end)
        ids = None
        if add_special_tokens is False:
            ids = tokenizer_of(front_end).encode(item, add_special_tokens=False)
        return ParsedPrompt(item, ids, salt)
    if isinstance(item, list) and all(type(token) is int for token in item):
        return ParsedPrompt(None, item, salt)
    raise bad_request(f"prompt must be {_FORMS}", "prompt", code="invalid_type")


def chat_prompt(request: ChatRequest | TokenizeRequest, front_end: FrontEnd, plan: ChatPlan) -> ParsedPrompt:
    """The prompt that the chat template makes of the messages. Raises ApiError 400, RequestError."""
    tokenizer = tokenizer_of(front_end)
    continues = bool(request.continue_final_message)
    starts = request.add_generation_prompt
    messages, tools = plan.put(_checked_messages(request, tokenizer, front_end.max_model_len))
    text = tokenizer.apply_chat_template(
        messages,
        not continues if starts is None else starts,
        continues,
        tools=tools,
        documents=request.documents if isinstance(request, ChatRequest) else None,
        chat_template=request.chat_template,
        **_template_variables(request.chat_template_kwargs or {}),
    )
    refuse_hopeless(text, front_end)
    salt = (request.cache_salt or "") if isinstance(request, ChatRequest) else ""
    ids = tokenizer.encode(text, add_special_tokens=bool(request.add_special_tokens))
    return ParsedPrompt(text, ids, salt)


def _template_variables(given: dict[str, Any]) -> dict[str, Any]:
    """vLLM's users put any template variable there, those with a field of their own too; that would be ambiguous."""
    for name in _OWN_VARIABLES:
        if name in given:
            raise bad_request(
                f"chat_template_kwargs: set {name} as a field of the request", "chat_template_kwargs"
            )
    return given


def _checked_messages(
    request: ChatRequest | TokenizeRequest, tokenizer: Tokenizer, max_model_len: int
) -> list[dict[str, Any]]:
    """The messages with known roles and fields. A template that knows no developers gets their words as the system's.

    A role or field of another name is taken if the template speaks of it.
    """
    source = request.chat_template or tokenizer.chat_template or ""
    count = len(request.messages or [])
    if count > max_model_len:
        raise RequestError(
            f"messages has {count} entries, but prompt and answer together may have at most {max_model_len} tokens "
            "(max_model_len): shorten it",
            param="messages",
            code="context_length_exceeded",
        )
    messages = []
    for index, message in enumerate(request.messages or []):
        role = message.get("role")
        if isinstance(role, str) and role not in _ROLES and role not in source:
            raise RequestError(
                f"messages[{index}].role is {role!r}; it must be one of {', '.join(sorted(_ROLES))}",
                param="messages",
                code="invalid_value",
            )
        unread = [name for name, value in message.items() if value is not None and not _reads(source, name)]
        refuse_unknown(unread, _MESSAGE_FIELDS, f"messages[{index}]")
        is_unknown = role == "developer" and "developer" not in source
        messages.append({**message, "role": "system"} if is_unknown else message)
    return messages


def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def refuse_hopeless(text: str, front_end: FrontEnd) -> None:
    """Refuse a text that cannot fit whatever its tokens are, before it is tokenized.

    Raises: RequestError "context_length_exceeded".
    """
    limit = front_end.max_model_len
    if front_end.tokenizer is None or len(text) <= limit:
        return
    least = front_end.tokenizer.min_num_tokens(text)
    if least >= limit:
        raise RequestError(
            f"the prompt has {len(text)} characters, so at least {least} tokens, but prompt and answer together may "
            f"have at most {limit} (max_model_len): shorten it",
            param="prompt",
            code="context_length_exceeded",
        )
