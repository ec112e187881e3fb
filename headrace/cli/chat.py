"""``headrace chat``: talk to a model in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from headrace.cli.chat_session import ChatSession
from headrace.cli.engine_options import EngineSettings, engine_options
from headrace.cli.streaming import advising_without_template
from headrace.errors import HeadraceError, RequestError
from headrace.sampling_params import SamplingParams

_HELP = """/clear forgets the conversation    /retry answers the last message again
/system TEXT sets the system message (and clears)    /exit or Ctrl-D ends    Ctrl-C cancels an answer
"""
_PROMPT = "> "


@engine_options
def chat(
    settings: EngineSettings,
    system: Annotated[str | None, typer.Option("--system", help="system message")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", help="tokens of an answer; what the context holds by default"),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the most likely token")] = 0.7,
    top_p: Annotated[
        float, typer.Option("--top-p", help="keep the most likely tokens of this total mass")
    ] = 0.95,
) -> None:
    """Talk to a model. Without a terminal each line of stdin is a message, and stdout holds the answers alone."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)

    from headrace.engine.async_llm import AsyncLLM

    with advising_without_template("headrace generate goes on from a text"):
        converse(ChatSession(AsyncLLM.from_config(settings.config), params, system))


def converse(session: ChatSession) -> None:
    """Read, answer, and so on until the input ends. Raises RequestError for what cannot be answered; on a terminal the
    conversation goes on after it."""
    is_terminal = sys.stdin.isatty()
    with asyncio.Runner() as runner:
        try:
            _load(runner, session)
            if is_terminal:
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401 - gives input() editing and a history
                _note(_HELP)
            while (line := _read(is_terminal)) is not None:
                if not _obey(runner, session, line.strip(), is_terminal):
                    break
        finally:
            runner.run(session.close())


def _load(runner: asyncio.Runner, session: ChatSession) -> None:
    from headrace.engine.progress import LoadBar

    with LoadBar() as bar:
        runner.run(session.load(bar))


def _read(is_terminal: bool) -> str | None:
    """The next line, or None at the end. Ctrl-C at the prompt only clears the line."""
    while True:
        try:
            return input(_PROMPT) if is_terminal else next(sys.stdin, None)
        except EOFError:
            _note("\n")
            return None
        except KeyboardInterrupt:
            _note("\n")


def _obey(runner: asyncio.Runner, session: ChatSession, line: str, is_terminal: bool) -> bool:
    """Carry out a command or answer a message. Returns False to end."""
    word, _, rest = line.partition(" ")
    if word in ("/exit", "/quit"):
        return False
    if word == "/clear":
        session.clear()
    elif word == "/system":
        session.set_system(rest.strip() or None)
    elif word == "/retry":
        _answer(runner, session, session.retry, is_terminal)
    elif word.startswith("/"):
        _note(_HELP)
    elif line:
        _answer(runner, session, lambda: session.say(line), is_terminal)
    return True


def _answer(
    runner: asyncio.Runner, session: ChatSession, prepare: Callable[[], None], is_terminal: bool
) -> None:
    try:
        prepare()
        runner.run(session.answer(_show))
    except KeyboardInterrupt:
        _note("\n(cancelled)\n")
        return
    except RequestError as error:
        if not is_terminal:
            raise  # a script reads the status, and answers to later lines would lack this one
        session.take_back()
        _note(f"headrace: {error}\n")
        return
    except HeadraceError:
        _show("\n")
        raise
    _show("\n")


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
