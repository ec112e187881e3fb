"""Throughput on a mostly forced text with jump-forward against the same ids sampled one a step, interleaved.

    python benchmarks/structured/bench_jump_forward.py MODEL [--requests 16] [--rounds 3] [-o KEY=VALUE ...]

The text is a character sheet (a regex). Prints tokens per second of both, their ratio and steps; fails if an id
differs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.structured.shapes import CHARACTER_SHEET, constraint, engine_config, run_batch
from headrace.engine.assemble import build_engine_core
from headrace.engine.constraints import Constraints
from headrace.engine.grammar_vocabulary import load_grammar_vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--option", action="append", default=[])
    args = parser.parse_args()
    config = engine_config(args.model, args.option)
    core = build_engine_core(config)
    source = core._mask_source
    assert isinstance(source, Constraints)
    end_ids = list(load_grammar_vocabulary(config.model).end_ids)
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 5000) for _ in range(48)] for _ in range(args.requests)]
    wanted, speeds, steps = constraint(regex=CHARACTER_SHEET), {True: [], False: []}, {}  # type: ignore[var-annotated]
    for number in range(args.rounds + 1):
        answers = {}
        for is_on in (True, False):
            source.jump_forward = is_on
            core.reset_prefix_cache()
            before = core.stats().num_steps
            answers[is_on], wall_s, _ = run_batch(core, prompts, 400, wanted, end_ids, f"{number}{is_on}")
            steps[is_on] = core.stats().num_steps - before
            if number:  # the first round warms up
                speeds[is_on].append(sum(map(len, answers[is_on].values())) / wall_s)
        assert answers[True] == answers[False], "jump-forward changed an answer"
    on, off = (statistics.median(speeds[is_on]) for is_on in (True, False))
    report = {
        "model": args.model,
        "requests": args.requests,
        "tok_s": on,
        "tok_s_one_a_step": off,
        "ratio": on / off,
    }
    print(json.dumps({**report, "steps": steps[True], "steps_one_a_step": steps[False]}))
    core.shutdown()


if __name__ == "__main__":
    main()
