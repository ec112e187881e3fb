"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.engine.front_end import FrontEnd
from headrace.engine.prompts import ParsedPrompt
from headrace.serve.body import decode_body
from headrace.serve.cache_control import control_in
from headrace.serve.chat_plan import ChatPlan, plan_chat
from headrace.serve.context import ServerContext, tokenizer_of
from headrace.serve.errors import bad_request, json_response
from headrace.serve.generation_routes import answer_chat
from headrace.serve.messages.convert import chat_request, conversation, names_of
from headrace.serve.messages.format import MessagesFormat
from headrace.serve.messages.protocol import CountRequest, MessagesRequest
from headrace.serve.prompts import chat_prompt
from headrace.serve.protocol import ChatRequest


async def create_message(context: ServerContext, request: Request, body: bytes) -> Response:
    """Answer a conversation."""
    given = decode_body(body, MessagesRequest)
    wanted = chat_request(given)
    wanted.cache_control = control_in(**msgspec.json.decode(body))
    return await answer_chat(context, wanted, len(body), _make_format, names_of(given))


def _make_format(
    wanted: ChatRequest, model: str, front_end: FrontEnd, plan: ChatPlan, prompt: ParsedPrompt
) -> MessagesFormat:
    wants_thinking = (wanted.chat_template_kwargs or {}).get("enable_thinking")
    if wants_thinking and plan.tags is None:
        raise bad_request("thinking: this model does not think before it answers: leave it out", "thinking")
    return MessagesFormat(model, plan, prompt)


async def count_tokens(context: ServerContext, request: Request, body: bytes) -> Response:
    """The number of tokens that a conversation has as a prompt."""
    given = decode_body(body, CountRequest)
    wanted = conversation(given)
    control_in(**msgspec.json.decode(body))
    await context.check_model(wanted.model)
    front_end = await context.llm.front_end()
    with names_of(given).spoken():
        plan = plan_chat(wanted, tokenizer_of(front_end), context.config)
        prompt = await asyncio.to_thread(chat_prompt, wanted, front_end, plan)
    return json_response({"input_tokens": len(prompt.token_ids or [])})
