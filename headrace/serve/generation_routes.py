"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from headrace.engine.front_end import FrontEnd
from headrace.engine.prompts import ParsedPrompt
from headrace.errors import GrammarError
from headrace.sampling_params import SamplingParams
from headrace.serve.answering import answer
from headrace.serve.body import decode_body
from headrace.serve.cache_control import control_in, pin_if_asked
from headrace.serve.chat_format import ChatFormat
from headrace.serve.chat_plan import ChatPlan, plan_chat
from headrace.serve.chunk_format import ChunkFormat
from headrace.serve.completion_format import CompletionFormat
from headrace.serve.context import ServerContext, tokenizer_of
from headrace.serve.errors import bad_request
from headrace.serve.field_names import FieldNames
from headrace.serve.job import AnswerFormat, Job
from headrace.serve.prompts import chat_prompt, completion_prompts
from headrace.serve.protocol import ChatRequest, CompletionRequest
from headrace.serve.sampling import chat_params, completion_params, field_names
from headrace.serve.tools.schema_errors import tool_schema_error
from headrace.serve.unsupported import refuse_unsupported

FormatMaker = Callable[[ChatRequest, str, FrontEnd, ChatPlan, ParsedPrompt], AnswerFormat]

# Tokenizing and rendering this much takes longer than a step: other streams must not wait for it.
_LARGE_BODY_BYTES = 16384
_LARGE_CONSTRAINT_BYTES = 2048  # schemas take longer for their size


async def create_completion(context: ServerContext, request: Request, body: bytes) -> Response:
    """Complete one prompt or a batch."""
    wanted = decode_body(body, CompletionRequest)
    names = field_names(wanted)
    model = await context.check_model(wanted.model)
    with names.spoken():
        refuse_unsupported(wanted)
        params = completion_params(wanted)
        front_end = await context.admit()
        if len(body) > _LARGE_BODY_BYTES:
            prompts = await asyncio.to_thread(completion_prompts, wanted, front_end)
        else:
            prompts = completion_prompts(wanted, front_end)
        await pin_if_asked(context, wanted.cache_control, prompts)
        form = CompletionFormat(wanted, model, front_end)
        form.add_notes(await _constraint_notes(params, front_end, len(body)))
        return await answer(context.llm, _job(context, wanted, prompts, params, form, names))


async def create_chat_completion(context: ServerContext, request: Request, body: bytes) -> Response:
    """Answer a conversation."""
    return await answer_chat(context, decode_body(body, ChatRequest), len(body), ChatFormat)


async def answer_chat(
    context: ServerContext,
    wanted: ChatRequest,
    num_bytes: int,
    make_format: FormatMaker,
    api_names: FieldNames | None = None,
) -> Response:
    """Answer a conversation in the form of one of the APIs.

    Args:
        num_bytes: size of the request's body.
        make_format: the form, for this request.
        api_names: what the API calls the fields of a chat request.
    """
    names = field_names(wanted)
    if api_names is not None:
        names = names.then(api_names)
    model = await context.check_model(wanted.model)
    with names.spoken():
        refuse_unsupported(wanted)
        params = chat_params(wanted)
        front_end = await context.admit()
        plan = plan_chat(wanted, tokenizer_of(front_end), context.config)
        if num_bytes > _LARGE_BODY_BYTES:
            prompt = await asyncio.to_thread(chat_prompt, wanted, front_end, plan)
        else:
            prompt = chat_prompt(wanted, front_end, plan)
        notes = await _constraint_notes(params, front_end, num_bytes)
        plan.adjust(params, prompt)
        await pin_if_asked(
            context,
            control_in(messages=wanted.messages, tools=wanted.tools, cache_control=wanted.cache_control),
            [prompt],
        )
        form = make_format(wanted, model, front_end, plan, prompt)
        if isinstance(form, ChunkFormat):
            form.add_notes(notes)
        try:
            return await answer(context.llm, _job(context, wanted, [prompt], params, form, names))
        except GrammarError as error:
            raise tool_schema_error(error, plan.use) from None


async def _constraint_notes(params: SamplingParams, front_end: FrontEnd, num_bytes: int) -> list[str]:
    """What the request's constraint says and nobody enforces. Raises GrammarError for one that no grammar can."""
    wanted = params.structured_outputs
    if wanted is None:
        return []
    if num_bytes > _LARGE_CONSTRAINT_BYTES:
        return (await asyncio.to_thread(front_end.inputs.constraint_of, wanted))[1]
    return front_end.inputs.constraint_of(wanted)[1]


def _job(
    context: ServerContext,
    wanted: CompletionRequest | ChatRequest,
    prompts: list[ParsedPrompt],
    params: SamplingParams,
    form: AnswerFormat,
    names: FieldNames,
) -> Job:
    limits = context.llm.config.scheduler
    most = limits.max_seats + limits.max_waiting_requests
    if len(prompts) * params.num_sequences > most:
        raise bad_request(
            f"the request asks for {len(prompts) * params.num_sequences} answers at once; this server takes at most "
            f"{most}: send it in parts",
            "prompt",
        )
    has_no_limit = wanted.max_tokens is None and getattr(wanted, "max_completion_tokens", None) is None
    return Job(prompts, params, form, bool(wanted.stream), has_no_limit, wanted.priority or 0, names)
