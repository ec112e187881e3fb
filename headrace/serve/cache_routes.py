"""Routes of the prefix cache: GET /cache, POST /cache/reset, /cache/explain, /cache/pin, /cache/unpin."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.engine.front_end import FrontEnd
from headrace.engine.prompts import ParsedPrompt
from headrace.serve.body import decode_body
from headrace.serve.cache_control import call_about, control_in, seconds_of, with_ids
from headrace.serve.chat_plan import plan_chat
from headrace.serve.context import ServerContext, tokenizer_of
from headrace.serve.errors import bad_request, json_response
from headrace.serve.prompts import chat_prompt, completion_prompts
from headrace.serve.protocol import ChatRequest, CompletionRequest, ShortText, TemplateText

MAX_SHOWN_NODES = 10_000
_REMOVAL_LOOK_S = 0.02


class CachePrompt(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which prompt is meant: ``prompt`` (text or token ids) or ``messages``; the salt is the request's own."""

    model: str | None = None
    prompt: Any = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: TemplateText | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    cache_salt: ShortText | None = None


class PinRequest(CachePrompt, kw_only=True):
    """A prompt, and how long it is kept: ``ttl`` by name or ``ttl_s`` in seconds."""

    ttl: str | None = None
    ttl_s: float | None = None


class NoFields(msgspec.Struct, forbid_unknown_fields=True):
    """A body that says nothing."""


async def show_cache(context: ServerContext, request: Request) -> Response:
    """The tree, large subtrees first, each node with the text it begins with."""
    text = request.query_params.get("max_nodes", "200")
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MAX_SHOWN_NODES:
        raise bad_request(f"max_nodes must be in [1, {MAX_SHOWN_NODES}]; got {text[:20]}", "max_nodes")
    tree = await context.llm.call_cache("tree", max_nodes=int(text))
    front_end = await context.llm.front_end()
    for node in tree.get("nodes", ()):
        # what others' prompts say is not shown to whoever may read the tree
        node["text"] = None if node["is_salted"] else _text(front_end, node["token_ids"])
        del node["token_ids"]
    return json_response(tree)


async def reset_cache(context: ServerContext, request: Request, body: bytes) -> Response:
    """Forget every prefix that no running request uses, in all tiers, pins too; tells of files that stay."""
    if body.strip():
        decode_body(body, NoFields)
    answer = await context.llm.call_cache("reset")
    left = await context.llm.call_cache("files_left")
    while not left.get("is_done", True):
        await asyncio.sleep(_REMOVAL_LOOK_S)
        left = await context.llm.call_cache("files_left")
    told = {name: left[name] for name in ("num_files_left", "files_left_reason") if name in left}
    return json_response({**answer, **told})


async def explain_cache(context: ServerContext, request: Request, body: bytes) -> Response:
    """What is cached of a prompt, and why not more."""
    prompt = await _prompt_of(context, decode_body(body, CachePrompt))
    report = await explain(context, prompt)
    return json_response({**report, "num_prompt_tokens": len(prompt.token_ids or [])})


async def pin_prefix(context: ServerContext, request: Request, body: bytes) -> Response:
    """Keep a prompt's prefix for a time; also what of it is computed later."""
    wanted = decode_body(body, PinRequest)
    if wanted.ttl is not None and wanted.ttl_s is not None:
        raise bad_request(
            f"ttl is {wanted.ttl!r:.100} and ttl_s is {wanted.ttl_s}: give one of them, by name or in seconds",
            "ttl",
        )
    ttl_s = wanted.ttl_s
    if ttl_s is None:
        ttl_s = seconds_of("5m" if wanted.ttl is None else wanted.ttl, "ttl", "ttl")
    prompt = await _prompt_of(context, wanted)
    return json_response(await call_about(context, "pin", prompt, ttl_s=ttl_s))


async def unpin_prefix(context: ServerContext, request: Request, body: bytes) -> Response:
    """Let a pinned prefix go."""
    prompt = await _prompt_of(context, decode_body(body, CachePrompt))
    return json_response(await call_about(context, "unpin", prompt))


async def explain(context: ServerContext, prompt: ParsedPrompt) -> dict[str, Any]:
    """The report of a prompt, tokens with their texts."""
    report = await call_about(context, "explain", prompt)
    front_end = await context.llm.front_end()
    for name in ("cached_token", "prompt_token"):
        if report.get(name) is not None:
            report[name] = {"id": report[name], "text": _text(front_end, [report[name]])}
    return report


async def _prompt_of(context: ServerContext, wanted: CachePrompt) -> ParsedPrompt:
    """The prompt with its token ids. Raises ApiError, RequestError for one that no request may have."""
    await context.check_model(wanted.model)
    if (wanted.prompt is None) == (wanted.messages is None):
        raise bad_request("give either prompt or messages", "prompt", code="missing_field")
    front_end = await context.llm.front_end()
    return await asyncio.to_thread(_parse, wanted, front_end, context)


def _parse(wanted: CachePrompt, front_end: FrontEnd, context: ServerContext) -> ParsedPrompt:
    if wanted.prompt is None:
        return with_ids(_chat_prompt(wanted, front_end, context), front_end)
    for name in ("tools", "chat_template", "chat_template_kwargs"):
        if getattr(wanted, name) is not None:
            raise bad_request(f"{name} goes with messages, not with prompt: leave it out", name)
    request = CompletionRequest(
        prompt=wanted.prompt, cache_salt=wanted.cache_salt, add_special_tokens=wanted.add_special_tokens
    )
    prompts = completion_prompts(request, front_end)
    if len(prompts) != 1:
        raise bad_request(f"prompt holds {len(prompts)} prompts: give one", "prompt")
    return with_ids(prompts[0], front_end)


def _chat_prompt(wanted: CachePrompt, front_end: FrontEnd, context: ServerContext) -> ParsedPrompt:
    control_in(
        messages=wanted.messages, tools=wanted.tools
    )  # a wrong one is refused as the request's would be
    chat = ChatRequest(
        messages=wanted.messages or [],
        tools=wanted.tools,
        chat_template=wanted.chat_template,
        chat_template_kwargs=wanted.chat_template_kwargs,
        add_special_tokens=wanted.add_special_tokens,
        cache_salt=wanted.cache_salt,
    )
    return chat_prompt(chat, front_end, plan_chat(chat, tokenizer_of(front_end), context.config))


def _text(front_end: FrontEnd, token_ids: list[int]) -> str | None:
    tokenizer = front_end.tokenizer
    return None if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=False)
