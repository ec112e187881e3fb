"""Offline throughput on the workloads built in, everything submitted at once, random weights.

    python benchmarks/offline/bench_offline.py llama-3-8b single b64 mix [--repeat 2] [--json FILE] [-o KEY=VALUE ...]

MODEL is a folder, or the name of a shape in benchmarks/data/models. Prints, per workload, output and input tokens per
second (best of the repeats), steps, their times, the share of wall time in which the device computed, and the host's
milliseconds a step. (``headrace bench`` reports latencies and shares of limits, too; this drives the engine core.)
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import yaml

from headrace.checkpoint import load_architecture, resolve_model
from headrace.cli.bench_report import spread
from headrace.cli.builtin_workloads import BUILT_IN, make_workload, temperature_of
from headrace.cli.workload import WorkloadRequest
from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import build_engine_core
from headrace.engine.engine_core import EngineCore
from headrace.engine.offline_order import in_offline_order
from headrace.engine.settled_start import settle
from headrace.engine.step_meter import StepMeter
from headrace.sampling_params import SamplingParams

SHAPES = Path(__file__).parent.parent / "data" / "models"


def make_core(model: str, options: dict[str, Any], is_offline: bool = True) -> EngineCore:
    """An engine core over a model, or over random weights for a shape of benchmarks/data/models; says what it took."""
    folder = SHAPES / model
    start = time.perf_counter()
    config = EngineConfig.from_options(
        **{
            "model": str(folder) if folder.is_dir() else model,
            "load_format": "dummy" if folder.is_dir() else "auto",
            "max_model_len": 32768 if folder.is_dir() else None,
            "skip_tokenizer_init": True,
            **options,
        }
    )
    core = build_engine_core(config, is_offline=is_offline)
    settle(core)  # as `LLM` does
    stats = core.stats()
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in stats.startup_s.items())
    print(
        f"{model}: ready in {time.perf_counter() - start:.1f} s ({stages}), {stats.num_kv_blocks} KV blocks, "
        f"{core.scheduler.config.max_seats} seats, {core.scheduler.config.max_step_tokens} tokens a step",
        flush=True,
    )
    return core


def vocab_size(model: str) -> int:
    """Of a model, or of a shape of benchmarks/data/models."""
    folder = SHAPES / model
    return load_architecture(resolve_model(str(folder) if folder.is_dir() else model)).vocab_size


def parse_options(texts: list[str]) -> dict[str, Any]:
    """KEY=VALUE to a setting, the value as in YAML."""
    return {key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in texts)}


def run(
    core: EngineCore,
    requests: list[WorkloadRequest],
    temperature: float,
    rate: float | None = None,
    *,
    keeps_order: bool = False,
) -> dict[str, Any]:
    """One pass from an empty prefix cache; all requests at once (longest answers first, as `LLM` does, unless it
    ``keeps_order``), or ``rate`` a second at random times."""
    core.reset_prefix_cache()
    rng = random.Random(0)
    due_s, waiting = 0.0, []
    for number, request in enumerate(requests):
        params = SamplingParams(
            temperature=temperature, max_tokens=request.output_len, ignore_eos=True, seed=number
        )
        waiting.append(
            (due_s, EngineCoreRequest(f"r{number}", request.prompt_ids, params, request.output_len))
        )
        due_s += rng.expovariate(rate) if rate else 0.0
    if rate is None and not keeps_order:
        waiting = in_offline_order(waiting, core.scheduler.config.policy, lambda item: item[1].max_tokens)
    waiting.reverse()
    times: dict[str, list[float]] = {item.request_id: [arrival] for arrival, item in waiting}
    with StepMeter(core) as meter:
        start = time.perf_counter()
        while waiting or core.has_work():
            now = time.perf_counter() - start
            while waiting and waiting[-1][0] <= now:
                core.add_request(waiting.pop()[1])
            for item in core.step():
                now = time.perf_counter() - start
                times[item.request_id] += [now] * len(item.new_token_ids)
    num_output = sum(len(came) - 1 for came in times.values())
    assert num_output == sum(request.output_len for request in requests)
    return figures(meter, times, num_output, sum(len(request.prompt_ids) for request in requests))


def figures(
    meter: StepMeter, times: dict[str, list[float]], num_output: int, num_input: int
) -> dict[str, Any]:
    """times: {request id: [arrival, when each token came]} in seconds."""
    gaps = sorted(1e3 * (b - a) for came in times.values() for a, b in itertools.pairwise(came[1:]))
    return {
        "wall_s": meter.wall_s,
        "output_tok_s": num_output / meter.wall_s,
        "input_tok_s": num_input / meter.wall_s,
        "steps": len(meter.device_ms),
        "step_ms": spread(meter.device_ms),
        "longest_steps_ms": sorted(meter.device_ms)[-12:],
        "device_share": 1.0 - meter.idle_share,
        "host_ms_per_step": meter.host_ms_per_step,
        "ttft_ms": spread(1e3 * (came[1] - came[0]) for came in times.values()),
        "itl_ms": spread(gaps) | ({"p95": gaps[int(0.95 * (len(gaps) - 1))]} if gaps else {}),
    }


def line(name: str, result: dict[str, Any]) -> str:
    """One run on a line."""
    steps = result["step_ms"]
    return (
        f"{name:10s} {result['output_tok_s']:9.1f} tok/s out {result['input_tok_s']:10.1f} in, "
        f"wall {result['wall_s']:.2f} s, {result['steps']} steps of {steps['mean']:.2f} ms on the device "
        f"(P50 {steps['p50']:.2f}, P99 {steps['p99']:.2f}), busy {100 * result['device_share']:.1f} %, "
        f"host {result['host_ms_per_step']:.2f} ms a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("workloads", nargs="+", choices=sorted(BUILT_IN))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("-o", "--option", action="append", default=[], help="engine option as KEY=VALUE")
    args = parser.parse_args()
    core = make_core(args.model, parse_options(args.option))
    rows = []
    for name in args.workloads:
        requests = make_workload(name, vocab_size(args.model))
        results = [run(core, requests, temperature_of(name)) for _ in range(args.repeat)]
        best = max(results, key=lambda result: float(result["output_tok_s"]))
        rows.append({"model": args.model, "workload": name, **best})
        print(line(name, best), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    core.shutdown()


if __name__ == "__main__":
    main()
