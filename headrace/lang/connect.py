"""Where programs run: an engine of this process, or a server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.errors import HeadraceError, RequestError
from headrace.lang.backend import Backend
from headrace.lang.http_client import HttpClient
from headrace.lang.local import LocalBackend
from headrace.lang.openai_server import OpenAIBackend
from headrace.lang.server import ServerBackend


def local(model: str = "smollm2", *, in_process: bool = False, **options: Any) -> Backend:
    """Start an engine for programs.

    Args:
        in_process: the engine runs in a thread of this process, not in a process of its own.
        options: settings of the engine, as ``LLM`` takes them.

    Raises: ConfigError. Whatever is wrong with the model is raised by the first program.
    """
    config = EngineConfig.from_options(model=model, **options)
    return LocalBackend(lambda: AsyncLLM.from_config(config, in_process=in_process))


def connect(base_url: str, *, model: str | None = None, api_key: str | None = None) -> Backend:
    """Use a server: Headrace's, or any with OpenAI's API (``OpenAIBackend`` says what is different there).

    Args:
        model: the name it serves; the first it lists by default.

    Raises: RequestError, EngineDeadError when there is no server.
    """
    client = HttpClient(base_url, api_key)
    models = asyncio.run(client.get("/v1/models"))["data"]
    if not models:
        raise RequestError(f"{base_url} serves no model")
    card = next((card for card in models if card["id"] == model), models[0] if model is None else None)
    if card is None:
        raise RequestError(
            f"{base_url} does not serve {model!r}; it has {', '.join(c['id'] for c in models)}"
        )
    is_headrace = card.get("owned_by") == "headrace"
    return (ServerBackend if is_headrace else OpenAIBackend)(client, card["id"])


def open_model(target: str) -> Backend:
    """A server when ``target`` is an address, else an engine for the model of that name. Raises as these do."""
    return connect(target) if target.startswith(("http://", "https://")) else local(target)


@contextmanager
def model_of_command_line(default: str = "smollm2") -> Iterator[Backend]:
    """For scripts: ``open_model`` of the first argument, or ``default`` without one.

    Headrace's errors, those of the programs run with it included, end the script: one line on stderr, status 1.
    """
    try:
        with open_model(sys.argv[1] if len(sys.argv) > 1 else default) as backend:
            yield backend
    except HeadraceError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}")
