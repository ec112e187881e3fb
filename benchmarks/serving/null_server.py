"""A server whose engine core answers at once without a model: what remains is the front end.

python benchmarks/serving/null_server.py [PORT] [STEP_SECONDS]
"""

from __future__ import annotations

import sys

from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.messages import CoreSpec
from headrace.engine.process_client import ProcessClient
from headrace.serve.port import open_port
from headrace.serve.server import Serving
from headrace.serve.settings import ServerConfig

NULL_CORE = "headrace.engine.null_core:build_null_core"
# Whole words of SmolLM2's vocabulary, so that each token is a piece of text.
TOKENS = [335, 342, 349, 392, 451, 520, 581, 638, 702, 768, 905, 1032, 1201, 1407, 1622]


def main(port: int, step_s: float) -> None:
    config = EngineConfig.from_options(max_num_seqs=256)
    server = ServerConfig(port=port)
    listener = open_port(server)
    llm = AsyncLLM(config, ProcessClient(CoreSpec(NULL_CORE, config, {"tokens": TOKENS, "step_s": step_s})))
    Serving(llm, server, listener, lambda text: print(text, file=sys.stderr, flush=True)).run()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8000, float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
