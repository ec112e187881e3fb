"""Where a step's time goes on a GPU: kernels by name.

    python benchmarks/offline/profile_step.py llama-3-8b --requests 64 --context 1024 [--temperature 0.6] [-o KEY=VALUE]
    python benchmarks/offline/profile_step.py llama-3-8b --requests 64 --context 1024 --prefill

Starts so many requests, lets them decode until graphs are captured, then profiles a few steps and prints microseconds a
step for each kernel, with the sum and the step's own time between device events. With ``--prefill`` the steps that
compute the prompts are profiled, the second time they come.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

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
    args = parser.parse_args()
    options = {key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in args.option)}
    config = EngineConfig.from_options(
        model=str(SHAPES / args.model),
        load_format="dummy",
        max_model_len=32768,
        skip_tokenizer_init=True,
        **options,
    )
    core = build_engine_core(config, is_offline=True)
    rng = random.Random(0)

    def start(name: str) -> None:
        for number in range(args.requests):
            ids = [rng.randrange(1000, 100000) for _ in range(args.context)]
            num_tokens = 1 if args.prefill else 512
            params = SamplingParams(
                temperature=args.temperature, max_tokens=num_tokens, ignore_eos=True, seed=number
            )
            core.add_request(EngineCoreRequest(f"{name}{number}", ids, params, num_tokens))

    start("r")
    running = core.scheduler.lifecycle
    if args.prefill:
        while core.has_work():
            core.step()
        start("s")
        core.step()
    else:
        while len(running.running) < args.requests or any(r.num_output_tokens < 8 for r in running.running):
            core.step()
    plain_ms = timed_steps(core, args.steps)
    totals = profiled_steps(core, args.steps)
    print(
        f"{args.model}, {args.requests} x {args.context}: step {plain_ms:.3f} ms on the device (not profiled)"
    )
    whole = sum(time for time, _ in totals.values()) / args.steps
    print(f"sum of kernels {whole:.0f} us a step")
    print_kernels(totals, args.steps)
    core.shutdown()


if __name__ == "__main__":
    main()
