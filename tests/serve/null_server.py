"""A server over an engine core without a model, for tests. ``python -m tests.serve.null_server '{"port": 1234}'``."""

from __future__ import annotations

import json
import sys
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.messages import CoreSpec
from headrace.engine.process_client import ProcessClient
from headrace.serve.port import open_port
from headrace.serve.server import Serving
from headrace.serve.settings import ServerConfig

# "1, 2, 3, ..." as SmolLM2 spells it, one token a piece.
TOKENS = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216]


def main(options: dict[str, Any]) -> None:
    engine = EngineConfig.from_options(**options.get("engine", {}))
    server = ServerConfig(**options.get("server", {}))
    factory = options.get("factory", "headrace.engine.null_core:build_null_core")
    core = options.get("core", {"tokens": TOKENS})
    listener = open_port(server)
    llm = AsyncLLM(engine, ProcessClient(CoreSpec(factory, engine, core)))
    Serving(llm, server, listener, lambda text: print(text, file=sys.stderr, flush=True)).run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
