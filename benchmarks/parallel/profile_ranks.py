"""Where a tensor-parallel step's time goes: the share of communication, and one rank's kernels by name.

    python benchmarks/parallel/profile_ranks.py llama-3-8b [single b64 mix prompts] --size 2 [-o KEY=VALUE ...]

``single``, ``b64`` and ``mix`` profile decode steps in the middle of these workloads, ``prompts`` steps of prompts
alone. Every rank runs the same engine in step with the others (prefill-first batching, which no measured time changes).
On CPUs the time in communication is that of the calls, on GPUs that of its kernels; waiting for a late rank is counted
in both.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "offline"))
from spmd import WaitClock, run_on_ranks
from step_profile import Totals, print_kernels, profiled_steps, timed_steps

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import assemble, with_device_defaults
from headrace.engine.engine_core import EngineCore
from headrace.parallel.world import World
from headrace.runtime.executor import InProcessExecutor
from headrace.runtime.worker import Worker
from headrace.sampling_params import SamplingParams

SHAPES = Path(__file__).parent.parent / "data" / "models"
COMMUNICATION = ("nccl", "all_reduce", "AllReduce", "AllGather")


class Load(NamedTuple):
    """Requests at once, tokens of context each, temperature, and whether their prompts are what is profiled."""

    num_requests: int
    context: int
    temperature: float = 0.0
    is_prompts: bool = False


LOADS = {
    "single": Load(1, 384),
    "b64": Load(64, 1152),
    "mix": Load(448, 600, 0.6),
    "prompts": Load(8, 1024, is_prompts=True),
}


def work(
    world: World, device: torch.device, clock: WaitClock, options: dict[str, Any], args: argparse.Namespace
) -> None:
    """One rank."""
    config = with_device_defaults(EngineConfig.from_options(**options), is_offline=True)
    worker = Worker(config.model, config.cache, config.scheduler, config.parallel, config.device, world=world)
    executor = InProcessExecutor(worker, config.scheduler.steps_outstanding, worker.is_asynchronous)
    core = assemble(config, executor)
    for name in args.workloads or LOADS:
        load = LOADS[name]._replace(**{} if args.scale is None else {"num_requests": args.scale})
        profile(name, load, core, world, clock, args.steps, worker.is_asynchronous)
    core.shutdown()


def profile(
    name: str,
    load: Load,
    core: EngineCore,
    world: World,
    clock: WaitClock,
    num_steps: int,
    has_kernels: bool,
) -> None:
    """Run one workload until its steps are as they will stay, measure, and end it."""
    rng = random.Random(0)
    num_tokens = 1 if load.is_prompts else 4 * num_steps + 32
    count = load.num_requests * (3 * num_steps + 6 if load.is_prompts else 1)
    for number in range(count):
        ids = [rng.randrange(3, 100) for _ in range(load.context)]
        params = SamplingParams(
            temperature=load.temperature, max_tokens=num_tokens, ignore_eos=True, seed=number
        )
        core.add_request(EngineCoreRequest(f"{name}{number}", ids, params, num_tokens))
    if load.is_prompts:
        for _ in range(5):
            core.step()
    else:
        running = core.scheduler.lifecycle
        while core.scheduler.lifecycle.num_waiting or any(
            request.num_output_tokens < 8 for request in running.running
        ):
            core.step()
    clock.waited_s = 0.0
    step_ms = timed_steps(core, num_steps)
    talking_ms = 1e3 * clock.waited_s / num_steps
    if world.rank == 0:
        print(
            f"{name} on {world.size} ({load.num_requests} x {load.context}): step {step_ms:.3f} ms",
            flush=True,
        )
    if has_kernels:
        report(name, profiled_steps(core, num_steps), num_steps, step_ms, is_told=world.rank == 0)
    elif world.rank == 0:
        print(
            f"{name}: communication {talking_ms:.3f} ms a step ({100 * talking_ms / step_ms:.1f} %)",
            flush=True,
        )
    core.abort_requests([f"{name}{number}" for number in range(count)])
    while core.has_work():
        core.step()


def report(name: str, totals: Totals, num_steps: int, step_ms: float, is_told: bool) -> None:
    """Kernels by time, and the share of communication."""
    if not is_told:
        return
    whole = sum(time for time, _ in totals.values()) / num_steps
    talking = sum(time for kernel, (time, _) in totals.items() if _is_communication(kernel)) / num_steps
    print(
        f"{name}: communication {talking:.0f} us a step ({talking / step_ms / 10:.1f} % of the step), all kernels "
        f"{whole:.0f} us"
    )
    print_kernels(totals, num_steps, most=12)
    sys.stdout.flush()


def _is_communication(kernel: str) -> bool:
    return any(word in kernel for word in COMMUNICATION)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(LOADS)}; all by default")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, help="requests at once, instead of the workload's own number")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit-s", type=float, default=300, help="ends all ranks after so many seconds")
    parser.add_argument("-o", "--option", action="append", default=[])
    args = parser.parse_args()
    if unknown := set(args.workloads) - LOADS.keys():
        parser.error(f"unknown workloads: {', '.join(unknown)}; known: {', '.join(LOADS)}")
    folder = SHAPES / args.model
    options = {
        "model": str(folder) if folder.is_dir() else args.model,
        "load_format": "dummy" if folder.is_dir() else "auto",
        "max_model_len": 8192,
        "skip_tokenizer_init": True,
        "batching": "prefill-first",
        "enable_prefix_caching": False,
        "device": args.device,
        "tensor_parallel_size": args.size,
        **{key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in args.option)},
    }
    config = EngineConfig.from_options(**options)
    run_on_ranks(work, config.parallel, args.device, options, args, limit_s=args.limit_s)


if __name__ == "__main__":
    main()
