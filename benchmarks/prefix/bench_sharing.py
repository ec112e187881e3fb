"""What sharing saves in practice, with prefix cache and cascade on and off.

    python benchmarks/prefix/bench_sharing.py smollm2 [--parts practice hits] [-o KEY=VALUE ...]
    python benchmarks/prefix/bench_sharing.py llama-3-8b -o max_num_batched_tokens=8192

practice: 64 requests of 1,024 tokens, 512 of them shared, 64 out: KV memory held at most, and wall time.
hits: 2,048 in, 128 out, 0, 50 and 75 % of each prompt cached beforehand: throughput against the cache switched off.
cpu: 16 requests of 512 shared and 32 own tokens, 32 out: wall time.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from engine_runs import Run, make_core, random_ids, run

OFF = {"enable_prefix_caching": False, "cascade": "off"}


def shared(count: int, common: int, own: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    head = random_ids(rng, common)
    return [head + random_ids(rng, own) for _ in range(count)]


def both(model: str, options: list[str], prompts: list[list[int]], num_output: int) -> tuple[Run, Run]:
    """(with sharing, without), each the best of two after a warm-up."""
    found = []
    for settings in ({}, OFF):
        core = make_core(model, options, **settings)
        run(core, prompts[:2], 4)
        results = []
        for _ in range(2):
            core.reset_prefix_cache()
            results.append(run(core, prompts, num_output))
        found.append(min(results, key=lambda result: result.wall_s))
        core.shutdown()
    return found[0], found[1]


def practice(model: str, options: list[str], count: int, common: int, own: int, out: int) -> None:
    on, off = both(model, options, shared(count, common, own, 1), out)
    print(
        f"{count} x ({common} shared + {own}) -> {out}: KV blocks {on.peak_blocks} against {off.peak_blocks} "
        f"({1 - on.peak_blocks / off.peak_blocks:.1%} saved), wall {on.wall_s:.2f} s against {off.wall_s:.2f} s "
        f"({1 - on.wall_s / off.wall_s:.1%} saved), tokens computed {on.num_computed} against {off.num_computed}",
        flush=True,
    )


def hits(model: str, options: list[str], count: int) -> None:
    """Each prompt has a beginning of its own that was served before."""
    rng = random.Random(2)
    for share in (0.0, 0.5, 0.75):
        heads = [random_ids(rng, int(2048 * share)) for _ in range(count)]
        prompts = [head + random_ids(rng, 2048 - len(head)) for head in heads]
        rates = []
        for settings in ({}, OFF):
            core = make_core(model, options, **settings)
            run(core, prompts[:1], 4)
            core.reset_prefix_cache()
            if share:
                run(core, heads, 1)
            rates.append(count * 128 / run(core, prompts, 128).wall_s)
            core.shutdown()
        print(
            f"{share:4.0%} cached: {rates[0]:8.1f} tok/s against {rates[1]:8.1f}: {rates[0] / rates[1]:.2f}x",
            flush=True,
        )


def main() -> None:
    """Print one line a part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument(
        "--parts", nargs="+", default=["practice", "hits"], choices=["practice", "hits", "cpu"]
    )
    parser.add_argument("--count", type=int, default=64, help="requests of practice and hits")
    parser.add_argument("-o", "--option", action="append", default=[], help="engine option as KEY=VALUE")
    args = parser.parse_args()
    if "practice" in args.parts:
        practice(args.model, args.option, args.count, 512, 512, 64)
    if "cpu" in args.parts:
        practice(args.model, args.option, 16, 512, 32, 32)
    if "hits" in args.parts:
        hits(args.model, args.option, args.count)


if __name__ == "__main__":
    main()
