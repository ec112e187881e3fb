"""``headrace serve``: OpenAI's API over HTTP."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any

from headrace.cli.engine_options import SERVER, EngineSettings, blaming, engine_options, setting_parameter
from headrace.cli.preflight import check_start
from headrace.config import build_section
from headrace.serve.settings import ServerConfig


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command(settings, server: ServerConfig)`` one flag for each field of ServerConfig; flags win over the
    file's section."""
    hints = typing.get_type_hints(ServerConfig)
    parameters = [next(iter(inspect.signature(command, eval_str=True).parameters.values()))]
    parameters += [
        setting_parameter("Server", setting, hints[setting.name])
        for setting in dataclasses.fields(ServerConfig)
    ]

    def with_server(settings: EngineSettings, **values: Any) -> None:
        given = {name: value for name, value in values.items() if value is not None}
        with blaming(settings.path, lambda: build_section(ServerConfig, SERVER, given)):
            server = build_section(ServerConfig, SERVER, {**settings.server, **given})
        command(settings, server)

    with_server.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_server.__doc__ = command.__doc__
    return with_server


@engine_options
@server_options
def serve(settings: EngineSettings, server: ServerConfig) -> None:
    """Serve a model over HTTP with OpenAI's API: completions, chat, models, metrics.

    The port answers at once; /health is 200 as soon as the model is loaded. SIGTERM or Ctrl-C lets running answers
    end; a second one does not.
    """
    # In this order: mistakes and a taken port are told at once, and the engine loads while the rest of this process
    # is imported.
    check_start(settings.config)
    from headrace.serve.port import open_port

    port = open_port(server)
    from headrace.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_config(settings.config)
    from headrace.serve.server import Serving

    Serving(llm, server, port, _announce).run()


def _announce(text: str) -> None:
    sys.stderr.write(f"headrace: {text}\n")
    sys.stderr.flush()
