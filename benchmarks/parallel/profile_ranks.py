"""Where a tensor-parallel decode step's time goes: kernels of one rank by name, and the share of communication.

    python benchmarks/parallel/profile_ranks.py llama-3-8b --size 2 --requests 64 --context 1024 [-o KEY=VALUE ...]

Every rank runs the same engine in step with the others (prefill-first batching, which no measured time changes).
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "offline"))
from spmd import run_on_ranks
from step_profile import Totals, print_kernels, profiled_steps, timed_steps

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import assemble, with_device_defaults
from headrace.parallel.world import World
from headrace.runtime.executor import InProcessExecutor
from headrace.runtime.worker import Worker
from headrace.sampling_params import SamplingParams

SHAPES = Path(__file__).parent.parent / "data" / "models"
COMMUNICATION = ("nccl", "all_reduce", "AllReduce", "AllGather")


def work(world: World, device: torch.device, options: dict[str, Any], args: argparse.Namespace) -> None:
    """One rank."""
    config = with_device_defaults(EngineConfig.from_options(**options))
    worker = Worker(config.model, config.cache, config.scheduler, config.parallel, config.device, world=world)
    executor = InProcessExecutor(worker, config.scheduler.steps_outstanding, worker.is_asynchronous)
    core = assemble(config, executor)
    rng = random.Random(0)
    for number in range(args.requests):
        ids = [rng.randrange(3, 100) for _ in range(args.context)]
        params = SamplingParams(temperature=args.temperature, max_tokens=256, ignore_eos=True, seed=number)
        core.add_request(EngineCoreRequest(f"r{number}", ids, params, 256))
    running = core.scheduler.lifecycle
    while len(running.running) < args.requests or any(r.num_output_tokens < 8 for r in running.running):
        core.step()
    plain_ms = timed_steps(core, args.steps)
    if device.type == "cuda":
        totals = profiled_steps(core, args.steps)
        if world.rank == 0:
            report(totals, args.steps)
    if world.rank == 0:
        print(
            f"{args.model} on {world.size}, {args.requests} x {args.context}: step {plain_ms:.3f} ms",
            flush=True,
        )
    core.shutdown()


def report(totals: Totals, num_steps: int) -> None:
    """Kernels by time, and the share of communication."""
    whole = sum(time for time, _ in totals.values())
    talking = sum(time for name, (time, _) in totals.items() if any(word in name for word in COMMUNICATION))
    print(
        f"sum of kernels {whole / num_steps:.0f} us a step, communication {talking / num_steps:.0f} us "
        f"({100 * talking / whole:.1f} %, waiting for the other rank counted)"
    )
    print_kernels(totals, num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("-o", "--option", action="append", default=[])
    args = parser.parse_args()
    folder = SHAPES / args.model
    options = {
        "model": str(folder) if folder.is_dir() else args.model,
        "load_format": "dummy" if folder.is_dir() else "auto",
        "max_model_len": 8192,
        "skip_tokenizer_init": True,
        "batching": "prefill-first",
        "device": args.device,
        "tensor_parallel_size": args.size,
        **{key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in args.option)},
    }
    config = EngineConfig.from_options(**options)
    run_on_ranks(work, config.parallel, args.device, options, args)


if __name__ == "__main__":
    main()
