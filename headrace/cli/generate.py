"""``headrace generate``: prompts in, text out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.engine_options import EngineSettings, engine_options
from headrace.cli.streaming import advising_without_template, stream_answer
from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.outputs import RequestOutput


@engine_options
def generate(
    settings: EngineSettings,
    prompt: Annotated[
        list[str],
        typer.Option("--prompt", "-p", help="text to go on from; - reads stdin; may be given several times"),
    ],
    chat: Annotated[bool, typer.Option("--chat", help="send each prompt as a user's message")] = False,
    system: Annotated[str | None, typer.Option("--system", help="system message, with --chat")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="generated tokens at most")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the most likely token")] = 1.0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="keep the most likely tokens of this total mass")
    ] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="keep this many tokens; 0 keeps all")] = 0,
    min_p: Annotated[
        float, typer.Option("--min-p", help="drop tokens below this share of the likeliest")
    ] = 0.0,
    n: Annotated[int, typer.Option("--n", "-n", help="answers to each prompt")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="text that ends an answer; repeatable")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on past end-of-text tokens")] = False,
) -> None:
    """Answer prompts; the text alone goes to stdout, everything else to stderr."""
    params = SamplingParams(
        n=n, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop=stop or None,
        max_tokens=max_tokens, ignore_eos=ignore_eos,
    )  # fmt: skip
    if system is not None and not chat:
        raise RequestError("--system needs --chat: a plain prompt has no messages", param="system")
    texts = [read_prompt(text) for text in prompt]
    first = [] if system is None else [{"role": "system", "content": system}]
    chats = [[*first, {"role": "user", "content": text}] for text in texts]
    with advising_without_template("leave out --chat, and it goes on from the prompt"):
        _answer(settings, texts, chats if chat else None, params)


def _answer(
    settings: EngineSettings,
    texts: list[str],
    chats: list[list[dict[str, str]]] | None,
    params: SamplingParams,
) -> None:
    """Answer the conversations, or the texts where there are none; on a terminal one is shown as it comes."""
    if len(texts) == 1 and params.n == 1 and sys.stdout.isatty():
        from headrace.engine.async_llm import AsyncLLM

        llm = AsyncLLM.from_config(settings.config, in_process=True)
        stream_answer(llm, texts[0], params, chats[0] if chats else None)
        return

    from headrace.engine.llm import LLM

    is_terminal = sys.stderr.isatty()
    with LLM.from_config(settings.config) as engine:
        if chats:
            outputs = engine.chat(chats, params, is_terminal)
        else:
            outputs = engine.generate(texts, params, is_terminal)
    write_answers(outputs)


def read_prompt(text: str) -> str:
    """The prompt itself, or what stdin holds for ``-``, less one newline at its end.

    Raises: RequestError if it is empty or not UTF-8.
    """
    if text == "-":
        data = sys.stdin.buffer.read() if sys.stdin is not None else b""
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise RequestError(
                f"stdin is not UTF-8 text (byte {error.start}); convert it", param="prompt"
            ) from None
        text = text.removesuffix("\n")
        if not text:
            raise RequestError("the prompt on stdin is empty; give some text", param="prompt")
    if not text:
        raise RequestError("--prompt is empty; give some text, or - to read stdin", param="prompt")
    return text


def write_answers(outputs: list[RequestOutput]) -> None:
    """Print every answer, each ended by a newline. Raises RequestError if one failed, after printing the others."""
    failures = []
    for output in outputs:
        for answer in output.outputs:
            if answer.finish_reason == "error":
                failures.append(answer.error or "unknown error")
            else:
                sys.stdout.write(answer.text if answer.text.endswith("\n") else answer.text + "\n")
    if failures:
        raise RequestError(f"{len(failures)} of the answers failed: {failures[0]}")
