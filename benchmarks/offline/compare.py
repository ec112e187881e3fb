"""The engine against itself: the papers' comparisons on the GPU workloads, one command each.

    python benchmarks/offline/compare.py llama-3-8b splitfuse|batching|overlap [--workload NAME] [--requests N]

splitfuse: prompts of 2,600 tokens that arrive at random beside running streams; whole prompts first against chunks that
    keep a step within ``--stall-ms``, by default 1.4 times the median one. Target: P95 of the time between tokens at
    least 4 times lower, P99 at most 1.5 times P50, median time to the first token at most 1.4 times as long.
batching: a batch that is formed once against continuous batching, in the order of the list (sorted by length, batches
    would be of one length each, and nobody would wait). Target: at least 3 times the tokens a second.
overlap: one step outstanding against two. Target: the device idle at most 2 % of the time.

Every variant is a process of its own, in which a run of a quarter of the requests comes first. Requests are random
token ids.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
from pathlib import Path
from typing import Any

from bench_offline import line, make_core, parse_options, run, vocab_size

from headrace.cli.builtin_workloads import BUILT_IN, make_workload, temperature_of
from headrace.cli.workload import WorkloadRequest

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "splitfuse": [{"batching": "prefill-first"}, {"batching": "continuous"}],
    "batching": [{"batching": "static"}, {"batching": "continuous"}],
    "overlap": [{"max_steps_outstanding": 1}, {"max_steps_outstanding": 2}],
}
STALL_FACTOR = 1.4


def arriving_prompts(count: int, prompt: int, output: int) -> list[WorkloadRequest]:
    """Of about so many tokens each, as in the paper on Dynamic SplitFuse."""
    rng = random.Random(5)
    made = []
    for _ in range(count):
        length = max(16, int(rng.gauss(prompt, 0.3 * prompt)))
        made.append(WorkloadRequest([rng.randrange(1000, 40000) for _ in range(length)], output))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("comparison", choices=sorted(VARIANTS))
    parser.add_argument("--workload", choices=sorted(BUILT_IN), default="sharegpt")
    parser.add_argument("--requests", type=int, help="the first so many; all by default, 120 for splitfuse")
    parser.add_argument("--rate", type=float, default=6.0, help="splitfuse: requests a second")
    parser.add_argument("--prompt", type=int, default=2600, help="splitfuse: tokens of a prompt, about")
    parser.add_argument("--output", type=int, default=128, help="splitfuse: tokens of an answer")
    parser.add_argument("--stall-ms", type=float, help="splitfuse: the longest step with a chunk in it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("-o", "--option", action="append", default=[], help="engine option as KEY=VALUE")
    args = parser.parse_args()
    is_splitfuse = args.comparison == "splitfuse"
    if is_splitfuse:
        requests, rate = arriving_prompts(args.requests or 120, args.prompt, args.output), args.rate
    else:
        requests, rate = make_workload(args.workload, vocab_size(args.model))[: args.requests], None
    temperature = 0.0 if is_splitfuse else temperature_of(args.workload)
    results: list[dict[str, Any]] = []
    for variant in VARIANTS[args.comparison]:
        options = {**parse_options(args.option), **variant}
        if is_splitfuse and results:
            options["max_stall_ms"] = args.stall_ms or STALL_FACTOR * results[0]["itl_ms"]["p50"]
        with multiprocessing.get_context("spawn").Pool(1) as process:
            keeps_order = args.comparison == "batching"
            result = process.apply(measure, (args.model, options, requests, temperature, rate, keeps_order))
        results.append({"model": args.model, "comparison": args.comparison, "options": options, **result})
        print(f"{options}\n{line(args.comparison, result)}\n  {latencies(result)}", flush=True)
    print(verdict(args.comparison, *results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def measure(
    model: str,
    options: dict[str, Any],
    requests: list[WorkloadRequest],
    temperature: float,
    rate: float | None,
    keeps_order: bool,
) -> dict[str, Any]:
    """One variant, from start to end: its memory is free afterwards."""
    core = make_core(model, options, is_offline=rate is None)
    run(core, requests[: len(requests) // 4 + 1], temperature, rate, keeps_order=keeps_order)
    result = run(core, requests, temperature, rate, keeps_order=keeps_order)
    core.shutdown()
    return result


def latencies(result: dict[str, Any]) -> str:
    """Of tokens and first tokens, in milliseconds."""
    itl, ttft = result["itl_ms"], result["ttft_ms"]
    return (
        f"ITL P50 {itl['p50']:.1f} P90 {itl['p90']:.1f} P95 {itl['p95']:.1f} P99 {itl['p99']:.1f} ms "
        f"(P99/P50 {itl['p99'] / itl['p50']:.2f}), TTFT P50 {ttft['p50']:.0f} P99 {ttft['p99']:.0f} ms"
    )


def verdict(comparison: str, first: dict[str, Any], second: dict[str, Any]) -> str:
    """What the targets are about."""
    speed = second["output_tok_s"] / first["output_tok_s"]
    if comparison == "splitfuse":
        return (
            f"P95 between tokens {first['itl_ms']['p95'] / second['itl_ms']['p95']:.2f}x lower, P99/P50 "
            f"{second['itl_ms']['p99'] / second['itl_ms']['p50']:.2f}, median time to first token "
            f"{second['ttft_ms']['p50'] / first['ttft_ms']['p50']:.2f}x"
        )
    return f"tokens a second {speed:.2f}x, device idle {100 * (1 - second['device_share']):.1f} %"


if __name__ == "__main__":
    main()
