"""KV memory of beams and of samples of one prompt, against the optimum of the recorded tree, counted each step.

    python benchmarks/prefix/bench_forks.py smollm2 [--requests 8] [--tokens 64] [--widths 2 4 6]

saved: 1 - blocks held / blocks of the same sequences unshared. The optimum shares every block whose tokens, from the
first on, are the same; blocks that differ later are counted apart, as they must be.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from engine_runs import make_core, random_ids, run

from headrace.engine.engine_core import EngineCore


class BlockCounter:
    """Sums over steps of blocks held, needed at best, and needed without sharing."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.held = self.best = self.unshared = 0

    def __call__(self) -> None:
        size = self._core.scheduler.kv.block_size
        blocks, prefixes = set(), set()
        for request in self._core.scheduler.lifecycle.requests.values():
            if not request.block_table or not request.num_output_tokens:
                continue
            blocks |= set(request.block_table[0])
            self.unshared += -(-request.capacity_tokens // size)
            tokens_known = request.token_ids  # the last one is what the next step writes
            key = 0
            for start in range(0, request.capacity_tokens, size):
                tokens = tokens_known[start : start + size]
                key = hash((key, *tokens)) if tokens else hash((key, request.request_id, start))
                prefixes.add(key)
        self.held += len(blocks)
        self.best += len(prefixes)

    def line(self) -> str:
        ours, best = (1 - count / self.unshared for count in (self.held, self.best))
        return f"saved {ours:6.1%}, optimum {best:6.1%}, {100 * (best - ours):+.2f} points short"


def main() -> None:
    """Print one line a width."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument(
        "--prompt", type=int, default=48, help="tokens of a prompt on average (Alpaca's are short)"
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("-o", "--option", action="append", default=[], help="engine option as KEY=VALUE")
    args = parser.parse_args()
    rng = random.Random(0)
    prompts = [
        random_ids(rng, rng.randint(args.prompt // 2, 3 * args.prompt // 2)) for _ in range(args.requests)
    ]
    core = make_core(args.model, args.option)
    for width in args.widths:
        for name, params in {
            "beams": {"use_beam_search": True, "n": 1, "best_of": width},
            "samples": {"n": width, "temperature": 0.8},
        }.items():
            core.reset_prefix_cache()
            counter = BlockCounter(core)
            run(core, prompts, args.tokens, counter, **params)
            print(f"{width} {name:8} {counter.line()}", flush=True)
    core.shutdown()


if __name__ == "__main__":
    main()
