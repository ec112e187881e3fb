"""One answer shown as it comes, and the wait for the engine before it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING

from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams
from headrace.tokenizer.base import NO_CHAT_TEMPLATE

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM
    from headrace.engine.prompts import ParsedPrompt
    from headrace.tokenizer import Tokenizer

_WATCH_S = 0.1


def stream_answer(
    llm: AsyncLLM, text: str, params: SamplingParams, messages: list[dict[str, str]] | None = None
) -> None:
    """Write one answer to stdout part by part, then a newline; ends the engine.

    Args:
        text: the prompt; with ``messages`` it is not looked at.
        messages: a conversation to answer instead.

    Raises: CheckpointError, ConfigError, RequestError, EngineDeadError.
    """
    from headrace.engine.progress import LoadBar

    with asyncio.Runner() as runner:
        try:
            with LoadBar() as bar:
                runner.run(wait_loaded(llm, bar))
            runner.run(_write(llm, text, params, messages))
        finally:
            runner.run(llm.shutdown())


async def wait_loaded(llm: AsyncLLM, progress: Callable[[str, float], None]) -> None:
    """Wait for the engine. Raises CheckpointError, ConfigError, EngineDeadError."""
    ready = asyncio.ensure_future(llm.wait_ready())
    try:
        while not (await asyncio.wait({ready}, timeout=_WATCH_S))[0]:
            progress(llm.progress.stage, llm.progress.share)
        await ready
    finally:
        ready.cancel()


@contextlib.contextmanager
def advising_without_template(advice: str) -> Iterator[None]:
    """Where the block finds that the model has no chat template, the RequestError says what this command can do."""
    try:
        yield
    except RequestError as error:
        if error.code != NO_CHAT_TEMPLATE:
            raise
        text = f"this model has no chat template, as base models have none: {advice}"
        raise RequestError(text, param=error.param, code=error.code) from None


async def parse_chat(llm: AsyncLLM, messages: list[dict[str, str]]) -> ParsedPrompt:
    """The prompt that a conversation makes. Raises RequestError without a tokenizer or for the template's refusal."""
    from headrace.engine.prompts import ParsedPrompt

    tokenizer = await _chat_tokenizer(llm)
    text = tokenizer.apply_chat_template(messages)
    return ParsedPrompt(text, tokenizer.encode(text, add_special_tokens=False))


async def require_chat(llm: AsyncLLM) -> None:
    """Raises RequestError for a model that cannot chat: it has no tokenizer or no template."""
    (await _chat_tokenizer(llm)).require_chat_template()


async def _chat_tokenizer(llm: AsyncLLM) -> Tokenizer:
    tokenizer = (await llm.front_end()).tokenizer
    if tokenizer is None:
        raise RequestError("chat needs a tokenizer: start without --skip-tokenizer-init")
    return tokenizer


async def text_parts(
    llm: AsyncLLM, prompt: str | ParsedPrompt, params: SamplingParams
) -> AsyncGenerator[str, None]:
    """The text of one answer (n = 1) as it comes. Raises RequestError if it fails, EngineDeadError."""
    from headrace.engine.output_processor import RequestOutputKind

    mailbox = await llm.submit([prompt], params, RequestOutputKind.DELTA)
    try:
        while not mailbox.is_done:
            for _, output in await mailbox.get():
                part = output.outputs[0]
                if part.finish_reason == "error":
                    raise RequestError(part.error or "the engine failed on this answer")
                yield part.text
    finally:
        mailbox.close()


async def _write(
    llm: AsyncLLM, text: str, params: SamplingParams, messages: list[dict[str, str]] | None
) -> None:
    prompt = text if messages is None else await parse_chat(llm, messages)
    last = ""
    try:
        async with contextlib.aclosing(text_parts(llm, prompt, params)) as parts:
            async for part in parts:
                sys.stdout.write(part)
                sys.stdout.flush()
                last = part or last
    finally:
        if last and not last.endswith("\n"):
            sys.stdout.write("\n")
