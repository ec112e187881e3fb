"""What long prompts do to running streams: SplitFuse chunks against prefill-first.

    OMP_NUM_THREADS=2 python benchmarks/core/bench_stalls.py [--streams 16] [--tokens 256] [--prompt 1500]

Keeps so many streams going (one that ends is followed by another, so that contexts and with them the undisturbed step
stay as long as they are), measures their undisturbed step, then lets prompts arrive one after another and prints the
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
from headrace.core.timeline import Timeline
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


class Streams:
    """Streams of random lengths up to ``args.tokens``; each that ends is followed by another."""

    def __init__(self, core: EngineCore, rng: random.Random, args: argparse.Namespace) -> None:
        self._core, self._rng, self._max_tokens = core, rng, args.tokens
        self._timelines: list[Timeline] = []
        self._num_started = 0
        self.names: list[str] = []
        for _ in range(args.streams):
            self._start()

    def step(self) -> set[str]:
        """A step of the engine; the requests that got tokens."""
        items = self._core.step()
        for item in items:
            if item.finish_reason is not None and item.request_id in self.names:
                self.names.remove(item.request_id)
                self._start()
        return {item.request_id for item in items}

    def gaps(self, start: float) -> list[float]:
        """Milliseconds between tokens since ``start``."""
        gaps = []
        for timeline in self._timelines:
            times = [t for t in timeline.token_times if t >= start]
            gaps += [1e3 * (b - a) for a, b in itertools.pairwise(times)]
        return gaps

    def _start(self) -> None:
        name = f"stream{self._num_started}"
        self._num_started += 1
        add(self._core, name, self._rng, 64, self._rng.randint(self._max_tokens // 4, self._max_tokens))
        self.names.append(name)
        self._timelines.append(self._core._families[name][0].timeline)


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
    streams = Streams(core, rng, args)
    calm_from = time.monotonic() + 1.0
    while time.monotonic() < calm_from + 4.0:
        streams.step()
    calm_ms = statistics.median(streams.gaps(calm_from))
    first_tokens: list[float] = []
    start = time.monotonic()
    for number in range(args.prompts):
        add(core, f"prompt{number}", rng, args.prompt, 1)
        sent, due, arrived = time.monotonic(), time.monotonic() + args.gap_s, False
        while time.monotonic() < due or not arrived:
            if f"prompt{number}" in streams.step():
                first_tokens.append(time.monotonic() - sent)
                arrived = True
    gaps = streams.gaps(start)
    p50, p90, p99 = (percentile(gaps, q) for q in (0.5, 0.9, 0.99))
    print(
        f"{batching:14s} max_stall_ms {max_stall_ms:6.0f}: undisturbed step {calm_ms:.1f} ms; with prompts ITL P50 "
        f"{p50:.1f} P90 {p90:.1f} P99 {p99:.1f} ms (P99/P50 {p99 / p50:.2f}), max {max(gaps):.0f}; "
        f"TTFT P50 {percentile(first_tokens, 0.5):.2f} s"
    )
    core.abort_requests(streams.names)
    while core.has_work():
        core.step()
    core.shutdown()
    return calm_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="of a stream at most, a quarter at least")
    parser.add_argument("--prompt", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--gap-s", type=float, default=6.0)
    args = parser.parse_args()
    calm_ms = run(args, "prefill-first", 250.0)
    run(args, "continuous", 1.4 * calm_ms)


if __name__ == "__main__":
    main()
