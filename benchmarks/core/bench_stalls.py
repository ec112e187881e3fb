"""What long prompts do to running streams: SplitFuse chunks against prefill-first.

    OMP_NUM_THREADS=2 python benchmarks/core/bench_stalls.py [--streams 16] [--tokens 2000] [--prompt 1500]

Starts the streams, measures their undisturbed step, then lets prompts arrive one after another and prints the
inter-token latency of the streams (P50, P90, P99) and the prompts' time to first token, for batching "continuous" with
``max_stall_ms`` at 1.4 times the undisturbed step, and for "prefill-first".
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import build_engine_core
from headrace.engine.engine_core import EngineCore
from headrace.sampling_params import SamplingParams


def add(core: EngineCore, name: str, rng: random.Random, prompt: int, output: int) -> None:
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    ids = [rng.randrange(1000, 40000) for _ in range(prompt)]
    core.add_request(EngineCoreRequest(name, ids, params, output, arrival_time=time.monotonic()))


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def run(args: argparse.Namespace, batching: str, max_stall_ms: float) -> float:
    """One batching; the undisturbed step in ms."""
    rng = random.Random(0)
    config = EngineConfig.from_options(
        model=args.model,
        batching=batching,
        max_stall_ms=max_stall_ms,
        max_steps_outstanding=2,
        enable_prefix_caching=False,
    )
    core = build_engine_core(config)
    for warm in range(3):  # the cost model sees chunks of several sizes before it has to choose
        add(core, f"warm{warm}", rng, 400 >> warm, 4)
    while core.has_work():
        core.step()
    for stream in range(args.streams):
        add(core, f"stream{stream}", rng, 64, args.tokens)
    streams = [core._families[f"stream{i}"][0] for i in range(args.streams)]
    while any(stream.num_output_tokens < 24 for stream in streams):
        core.step()
        if any(stream.num_output_tokens == args.tokens for stream in streams):
            raise SystemExit("not all streams fit into the KV cache at once; lower --tokens or --streams")
    times = streams[0].timeline.token_times[-20:]
    calm_ms = 1e3 * statistics.median(b - a for a, b in itertools.pairwise(times))
    first_tokens: list[float] = []
    start = time.monotonic()
    for number in range(args.prompts):
        add(core, f"prompt{number}", rng, args.prompt, 1)
        sent, due, arrived = time.monotonic(), time.monotonic() + args.gap_s, False
        while time.monotonic() < due or not arrived:
            for item in core.step():
                if item.request_id == f"prompt{number}":
                    first_tokens.append(time.monotonic() - sent)
                    arrived = True
    if any(stream.num_output_tokens == args.tokens for stream in streams):
        raise SystemExit("a stream ended before the last prompt; raise --tokens")
    gaps = []
    for stream in streams:
        times = [t for t in stream.timeline.token_times if t >= start]
        gaps += [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    p50, p90, p99 = (percentile(gaps, q) for q in (0.5, 0.9, 0.99))
    print(
        f"{batching:14s} max_stall_ms {max_stall_ms:6.0f}: undisturbed step {calm_ms:.1f} ms; with prompts ITL P50 "
        f"{p50:.1f} P90 {p90:.1f} P99 {p99:.1f} ms (P99/P50 {p99 / p50:.2f}), max {max(gaps):.0f}; "
        f"TTFT P50 {percentile(first_tokens, 0.5):.2f} s"
    )
    core.abort_requests([f"stream{i}" for i in range(args.streams)])
    while core.has_work():
        core.step()
    core.shutdown()
    return calm_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2000, help="of a stream: they must outlast the prompts")
    parser.add_argument("--prompt", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--gap-s", type=float, default=6.0)
    args = parser.parse_args()
    calm_ms = run(args, "prefill-first", 250.0)
    run(args, "continuous", 1.4 * calm_ms)


if __name__ == "__main__":
    main()
