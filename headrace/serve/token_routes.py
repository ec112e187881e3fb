"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.engine.front_end import FrontEnd
from headrace.serve.body import decode_body
from headrace.serve.cache_control import control_in
from headrace.serve.chat_plan import plan_chat
from headrace.serve.context import ServerContext, tokenizer_of
from headrace.serve.errors import bad_request, json_response
from headrace.serve.prompts import chat_prompt
from headrace.serve.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from headrace.serve.settings import ServerConfig


async def tokenize(context: ServerContext, request: Request, body: bytes) -> Response:
    """Token ids of a prompt, or of what the chat template makes of messages."""
    wanted = decode_body(body, TokenizeRequest)
    await context.check_model(wanted.model)
    if (wanted.prompt is None) == (wanted.messages is None):
        raise bad_request("give either prompt or messages", "prompt", code="missing_field")
    front_end = await context.llm.front_end()
    answer = await asyncio.to_thread(_tokenized, wanted, front_end, context.config)
    return json_response({**answer, "max_model_len": await context.max_model_len()})


def _tokenized(wanted: TokenizeRequest, front_end: FrontEnd, config: ServerConfig) -> dict[str, Any]:
    tokenizer = tokenizer_of(front_end)
    if wanted.prompt is not None:
        ids = tokenizer.encode(wanted.prompt, add_special_tokens=wanted.add_special_tokens is not False)
    else:
        control_in(messages=wanted.messages, tools=wanted.tools)
        request = ChatRequest(
            messages=wanted.messages or [], tools=wanted.tools, chat_template=wanted.chat_template
        )
        plan = plan_chat(request, tokenizer, config)
        ids = chat_prompt(wanted, front_end, plan).token_ids or []
    texts = [tokenizer.token_text(token) for token in ids] if wanted.return_token_strs else None
    return {"count": len(ids), "tokens": ids, "token_strs": texts}


async def detokenize(context: ServerContext, request: Request, body: bytes) -> Response:
    """The text of token ids, special ones included."""
    wanted = decode_body(body, DetokenizeRequest)
    await context.check_model(wanted.model)
    front_end = await context.llm.front_end()
    front_end.inputs.check_vocabulary("tokens", wanted.tokens)
    return json_response({"prompt": tokenizer_of(front_end).decode(wanted.tokens, skip_special_tokens=False)})
