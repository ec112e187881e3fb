"""What sharing saves in practice: an engine with prefix cache and cascade against one without.

    python benchmarks/prefix/bench_sharing.py llama-3-8b
    python benchmarks/prefix/bench_sharing.py smollm2 [--parts practice hits] [--count 8] [--rounds 2] [-o KEY=VALUE]

practice: 64 requests of 1,024 tokens, 512 of them shared, 64 out: KV blocks held at most, and times. (The engine
    without sharing may run fewer requests at once: blocks are compared with the same requests', unshared.)
hits: 2,048 in, 128 out, 0, 50 and 75 % of each prompt cached beforehand: throughput against the cache switched off.
cpu: 16 requests of 512 shared and 32 own tokens, 32 out.

Each engine has a process of its own, one after the other, so that the second finds all of the device's memory. All
requests of a part are submitted at once; a part's figure is the best of the rounds, of which the first compiles.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from engine_runs import Run, make_core, random_ids, run

from headrace.engine.engine_core import EngineCore

OFF = {"enable_prefix_caching": False, "cascade": "off"}
SHARES = (0.0, 0.5, 0.75)
Figures = dict[str, dict[str, Any]]


def shared(count: int, common: int, own: int) -> list[list[int]]:
    rng = random.Random(1)
    head = random_ids(rng, common)
    return [head + random_ids(rng, own) for _ in range(count)]


def best(core: EngineCore, heads: list[list[int]], prompts: list[list[int]], out: int, rounds: int) -> Run:
    """The quickest of the rounds; before each the cache is emptied and ``heads`` are served."""
    results = []
    for _ in range(rounds):
        core.reset_prefix_cache()
        if heads:
            run(core, heads, 1)
        results.append(run(core, prompts, out))
    return min(results, key=lambda result: result.wall_s)


def measure(args: argparse.Namespace) -> Figures:
    """All parts on one engine, by name."""
    is_off = args.side == "off"
    core = make_core(args.model, args.option, **(OFF if is_off else {}))
    found: Figures = {}

    def keep(name: str, result: Run) -> None:
        found[name] = {**asdict(result), "mean_s": sum(result.finished_s) / len(result.finished_s)}
        print(f"  {args.side} {name}: {result.wall_s:.3f} s", flush=True)

    run(core, shared(2, 512, 512), 4)
    for part, prompts, out in (
        ("practice", shared(args.count, 512, 512), 64),
        ("cpu", shared(16, 512, 32), 32),
    ):
        if part in args.parts:
            keep(part, best(core, [], prompts, out, args.rounds))
    if "hits" in args.parts:
        rng = random.Random(2)
        for share in (0.0,) if is_off else SHARES:  # without a cache all shares are the same work
            head = int(args.prompt * share)
            heads = [random_ids(rng, head) for _ in range(args.count if head else 0)]
            prompts = [
                (heads[i] if head else []) + random_ids(rng, args.prompt - head) for i in range(args.count)
            ]
            keep(f"hits {share:.0%}", best(core, heads, prompts, args.out, args.rounds))
    core.shutdown()
    return found


def in_process(side: str) -> Figures:
    """``measure`` in another process; nothing if it failed, which it tells itself."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--json", file.name]
        code = subprocess.run(command, check=False).returncode
        text = Path(file.name).read_text()
    if code:
        print(f"  the engine {side} ended with status {code}", flush=True)
    return dict(json.loads(text)) if text else {}


def report(on: Figures, off: Figures, args: argparse.Namespace) -> None:
    """One line a part."""
    for name in on.keys() & off.keys() - {"hits 0%"}:
        a, b = on[name], off[name]
        blocks, unshared = a["peak_blocks"], a["unshared_blocks"]
        print(
            f"{name}: KV blocks at most {blocks}, of the same requests unshared {unshared} "
            f"({1 - blocks / unshared:.1%} saved; other engine at most {b['peak_blocks']}), tokens computed "
            f"{a['num_computed']} against {b['num_computed']}"
        )
        for key, what in (("wall_s", "whole"), ("mean_s", "mean of a request")):
            print(f"  {what} {a[key]:.3f} s against {b[key]:.3f} s ({1 - a[key] / b[key]:.1%} saved)")
    for name in (f"hits {share:.0%}" for share in SHARES):
        if name in on and "hits 0%" in off:
            rates = [args.count * args.out / each["wall_s"] for each in (on[name], off["hits 0%"])]
            print(f"{name}: {rates[0]:8.1f} tok/s against {rates[1]:8.1f}: {rates[0] / rates[1]:.3f}x")


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
    parser.add_argument("--prompt", type=int, default=2048, help="tokens in, of hits")
    parser.add_argument("--out", type=int, default=128, help="tokens out, of hits")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--option", action="append", default=[], help="engine option as KEY=VALUE")
    parser.add_argument("--side", choices=["on", "off"], help="one engine only")
    parser.add_argument("--json", type=Path, help="with --side: where its figures go")
    args = parser.parse_args()
    if args.side is None:
        report(in_process("on"), in_process("off"), args)
        return
    figures = measure(args)
    if args.json:
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
