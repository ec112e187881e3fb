"""Time between tokens with every request constrained against the same requests free, interleaved.

    python benchmarks/structured/bench_itl.py MODEL [--requests 32] [--tokens 64] [--rounds 5] [-o KEY=VALUE ...]

Both kinds sample as many tokens; the constraint is a long list of strings, sampled one token a step. Prints the
medians and their ratio.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.structured.shapes import endless_list, engine_config, run_batch
from headrace.engine.assemble import build_engine_core
from headrace.engine.grammar_vocabulary import load_grammar_vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--option", action="append", default=[])
    args = parser.parse_args()
    config = engine_config(args.model, [*args.option, "enable_jump_forward=false"])
    core = build_engine_core(config)
    vocabulary = load_grammar_vocabulary(config.model)
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 5000) for _ in range(64)] for _ in range(args.requests)]
    wanted, medians = endless_list(), {"free": [], "constrained": []}  # type: ignore[var-annotated]
    for number in range(args.rounds + 1):
        for kind, constraint in (("free", None), ("constrained", wanted)):
            core.reset_prefix_cache()
            serial = f"{kind}{number}"
            tokens, _, gaps = run_batch(
                core, prompts, args.tokens, constraint, list(vocabulary.end_ids), serial
            )
            assert sum(map(len, tokens.values())) == args.requests * args.tokens
            if number:  # the first round warms up
                medians[kind].append(1e3 * statistics.median(gaps))
    free, constrained = (statistics.median(medians[kind]) for kind in ("free", "constrained"))
    report = {
        "model": args.model,
        "requests": args.requests,
        "itl_ms_free": free,
        "itl_ms_constrained": constrained,
    }
    print(json.dumps({**report, "ratio": constrained / free}))
    core.shutdown()


if __name__ == "__main__":
    main()
