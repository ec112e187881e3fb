"""Where a step's time goes on a GPU: kernels by name.

    python benchmarks/offline/profile_step.py llama-3-8b --requests 64 --context 1024 [--temperature 0.6] [-o KEY=VALUE]
    python benchmarks/offline/profile_step.py llama-3-8b --requests 64 --context 1024 --prefill
    python benchmarks/offline/profile_step.py llama-3-8b --each 1 8 64 256 --context 1024

Starts so many requests, lets them decode until graphs are captured, then profiles a few steps and prints microseconds a
step for each kernel, with the sum and the step's own time between device events. With ``--prefill`` the steps that
compute the prompts are profiled, the second time they come. ``--each`` prints the time of a step of so many decodes,
one number of requests after the other, and no kernels.
"""

from __future__ import annotations

import argparse
import random
import threading
from pathlib import Path
from typing import Any

import yaml
from step_profile import print_kernels, profiled_steps, timed_steps

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import build_engine_core
from headrace.sampling_params import SamplingParams

SHAPES = Path(__file__).parent.parent / "data" / "models"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("-o", "--option", action="append", default=[])
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--each", type=int, nargs="+", metavar="REQUESTS")
    args = parser.parse_args()
    options = {key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in args.option)}
    config = EngineConfig.from_options(
        model=str(SHAPES / args.model),
        **{"load_format": "dummy", "max_model_len": 32768, "skip_tokenizer_init": True, **options},
    )
    core = build_engine_core(config, is_offline=True)
    if args.each:
        wait_for_kernels()
        for num_requests in args.each:
            print_time(core, args, num_requests)
    else:
        print_profile(core, args)
    core.shutdown()


def wait_for_kernels() -> None:
    """Until the engine's threads have compiled what decoding needs; steps run op by op meanwhile."""
    for thread in threading.enumerate():
        if thread.name in ("headrace-warmup", "headrace-compile"):
            thread.join()


def start(core: Any, args: argparse.Namespace, num_requests: int, name: str) -> None:
    """Hand over so many prompts."""
    rng = random.Random(0)
    num_tokens = 1 if args.prefill else 512
    for number in range(num_requests):
        ids = [rng.randrange(1000, 100000) for _ in range(args.context)]
        params = SamplingParams(
            temperature=args.temperature, max_tokens=num_tokens, ignore_eos=True, seed=number
        )
        core.add_request(EngineCoreRequest(f"{name}{number}", ids, params, num_tokens))


def decode(core: Any, num_requests: int) -> None:
    """Step until all decode, and graphs are captured."""
    lifecycle = core.scheduler.lifecycle
    while len(lifecycle.running) < num_requests or any(r.num_output_tokens < 8 for r in lifecycle.running):
        core.step()


def print_time(core: Any, args: argparse.Namespace, num_requests: int) -> None:
    """Milliseconds of a step of decodes, the median of three times so many steps."""
    names = f"n{num_requests}-"
    start(core, args, num_requests, names)
    decode(core, num_requests)
    wait_for_kernels()
    for _ in range(8):  # which capture what has been compiled
        core.step()
    ms = sorted(timed_steps(core, args.steps) for _ in range(3))[1]
    print(f"{args.model}, {num_requests} x {args.context}: step {ms:.3f} ms on the device", flush=True)
    core.abort_requests([f"{names}{number}" for number in range(num_requests)])
    while core.has_work():
        core.step()


def print_profile(core: Any, args: argparse.Namespace) -> None:
    """Kernels of a step by name."""
    start(core, args, args.requests, "r")
    if args.prefill:
        while core.has_work():
            core.step()
        start(core, args, args.requests, "s")
        core.step()
    else:
        decode(core, args.requests)
    plain_ms = timed_steps(core, args.steps)
    totals = profiled_steps(core, args.steps)
    print(
        f"{args.model}, {args.requests} x {args.context}: step {plain_ms:.3f} ms on the device (not profiled)"
    )
    whole = sum(time for time, _ in totals.values()) / args.steps
    print(f"sum of kernels {whole:.0f} us a step")
    print_kernels(totals, args.steps)


if __name__ == "__main__":
    main()
