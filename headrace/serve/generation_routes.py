"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from headrace.engine.prompts import ParsedPrompt
from headrace.sampling_params import SamplingParams
from headrace.serve.answering import answer
from headrace.serve.body import decode_body
from headrace.serve.chat_format import ChatFormat
from headrace.serve.completion_format import CompletionFormat
from headrace.serve.context import ServerContext
from headrace.serve.errors import ApiError
from headrace.serve.job import AnswerFormat, Job
from headrace.serve.prompts import chat_prompt, completion_prompts
from headrace.serve.protocol import ChatRequest, CompletionRequest
from headrace.serve.sampling import chat_params, completion_params
from headrace.serve.unsupported import refuse_unsupported

# Tokenizing and rendering this much takes longer than a step: other streams must not wait for it.
_LARGE_BODY_BYTES = 16384


async def create_completion(context: ServerContext, request: Request, body: bytes) -> Response:
    """Complete one prompt or a batch."""
    wanted = decode_body(body, CompletionRequest)
    model = await context.check_model(wanted.model)
    refuse_unsupported(wanted)
    params = completion_params(wanted)
    front_end = await context.admit()
    if len(body) > _LARGE_BODY_BYTES:
        prompts = await asyncio.to_thread(completion_prompts, wanted, front_end)
    else:
        prompts = completion_prompts(wanted, front_end)
    form = CompletionFormat(wanted, model, front_end)
    return await answer(context.llm, _job(context, wanted, prompts, params, form))


async def create_chat_completion(context: ServerContext, request: Request, body: bytes) -> Response:
    """Answer a conversation."""
    wanted = decode_body(body, ChatRequest)
    model = await context.check_model(wanted.model)
    refuse_unsupported(wanted)
    params = chat_params(wanted)
    front_end = await context.admit()
    if len(body) > _LARGE_BODY_BYTES:
        prompt = await asyncio.to_thread(chat_prompt, wanted, front_end)
    else:
        prompt = chat_prompt(wanted, front_end)
    form = ChatFormat(wanted, model, front_end)
    return await answer(context.llm, _job(context, wanted, [prompt], params, form))


def _job(
    context: ServerContext,
    wanted: CompletionRequest | ChatRequest,
    prompts: list[ParsedPrompt],
    params: SamplingParams,
    form: AnswerFormat,
) -> Job:
    limits = context.llm.config.scheduler
    most = limits.max_num_seqs + limits.max_waiting_requests
    if len(prompts) * params.n > most:
        raise ApiError(
            400,
            f"the request asks for {len(prompts) * params.n} answers at once; this server takes at most {most}: "
            "send it in parts",
            param="prompt",
        )
    has_no_limit = wanted.max_tokens is None and getattr(wanted, "max_completion_tokens", None) is None
    return Job(prompts, params, form, bool(wanted.stream), has_no_limit, wanted.priority or 0)
