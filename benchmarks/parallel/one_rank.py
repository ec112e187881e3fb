"""What does the parallel code cost where there is one rank? Decode steps of three engines over one device, by turns:

plain      layers that know nothing of ranks
in-process the engine as it is
executor   its one rank a process of its own, behind the executor of several, in a process group of one

    python benchmarks/parallel/one_rank.py llama-3-8b [--requests 64] [--context 1152] [--device cuda] [-o KEY=VALUE]

Prints milliseconds a step and the ratio to ``plain`` (median of the rounds). In process at most 1.01 is wanted, and no
collective may be called, which is checked.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from torch import Tensor

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import assemble, with_device_defaults
from headrace.engine.engine_core import EngineCore
from headrace.layers import attention, mlp
from headrace.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from headrace.layers.linear import Linear, RowParallelLinear
from headrace.layers.sliced_logits import SlicedLogits
from headrace.models import causal_lm
from headrace.parallel.state import SoloCommunicator
from headrace.runtime.executor import InProcessExecutor
from headrace.runtime.multiproc_executor import MultiprocExecutor
from headrace.sampling_params import SamplingParams

SHAPES = Path(__file__).parent.parent / "data" / "models"


class PlainLinear(RowParallelLinear):
    """Nobody to add up with."""

    __call__ = Linear.__call__


class PlainEmbedding(VocabParallelEmbedding):
    """The whole table."""

    def __call__(self, ids: Tensor, out: Tensor) -> None:
        if self.matrix is not None:
            self._ops.embedding_packed(ids, self.matrix, out, self._scale)
        else:
            self._ops.embedding(ids, self.weight, out, self._scale)


class PlainHead(ParallelLMHead):
    """The whole vocabulary."""

    def __call__(self, hidden: Tensor, rows: Tensor) -> SlicedLogits:
        chosen, logits = self._chosen.rows(len(rows)), self._local.rows(len(rows))
        self._ops.gather_rows(hidden, rows, chosen)
        self._matrix.apply(chosen, logits, 0)
        if self._soft_cap is not None:
            self._ops.soft_cap(logits, self._soft_cap)
        return SlicedLogits(logits)


def plain(config: EngineConfig) -> EngineCore:
    """An engine of plain layers."""
    with ExitStack() as stack:
        for room in (attention, mlp):
            stack.enter_context(mock.patch.object(room, "RowParallelLinear", PlainLinear))
        stack.enter_context(mock.patch.object(causal_lm, "VocabParallelEmbedding", PlainEmbedding))
        stack.enter_context(mock.patch.object(causal_lm, "ParallelLMHead", PlainHead))
        return assemble(config, InProcessExecutor.from_config(config))


ENGINES: dict[str, Callable[[EngineConfig], EngineCore]] = {
    "plain": plain,
    "in-process": lambda config: assemble(config, InProcessExecutor.from_config(config)),
    "executor": lambda config: assemble(config, MultiprocExecutor(config)),
}


def start(core: EngineCore, args: argparse.Namespace) -> None:
    """The requests, until all of them decode and their steps are as they will stay."""
    rng = random.Random(0)
    num_tokens = 24 + args.rounds * (args.steps + 4)
    for number in range(args.requests):
        ids = [rng.randrange(3, 100) for _ in range(args.context)]
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        core.add_request(EngineCoreRequest(f"r{number}", ids, params, num_tokens))
    running = core.scheduler.lifecycle
    while len(running.running) < args.requests or any(r.num_output_tokens < 8 for r in running.running):
        core.step()


def step_ms(core: EngineCore, num_steps: int) -> float:
    """Wall time of a step, the host's and the device's, as they overlap."""
    for _ in range(2):
        core.step()
    begun = time.perf_counter()
    for _ in range(num_steps):
        core.step()
    return 1e3 * (time.perf_counter() - begun) / num_steps


def compare(config: EngineConfig, args: argparse.Namespace) -> bool:
    """By turns; True when the engine as it is costs at most 1 % more than the plain one."""
    calls: list[str] = []
    with (
        mock.patch.object(SoloCommunicator, "all_reduce", lambda *_: calls.append("all_reduce")),
        mock.patch.object(SoloCommunicator, "all_gather", lambda *_: calls.append("all_gather")),
    ):
        cores = {}
        for name in args.only or ENGINES:
            begun = time.perf_counter()
            cores[name] = ENGINES[name](config)
            start(cores[name], args)
            print(f"{name}: decodes after {time.perf_counter() - begun:.1f} s", flush=True)
        times: dict[str, list[float]] = {name: [] for name in cores}
        for turn in range(args.rounds):
            order = list(cores) if turn % 2 else list(cores)[::-1]
            for name in order:
                times[name].append(step_ms(cores[name], args.steps))
    for core in cores.values():
        core.shutdown()
    assert not calls, f"one rank called {calls[0]}"
    ratios = {
        name: statistics.median(one / base for one, base in zip(each, times["plain"], strict=True))
        for name, each in times.items()
    }
    for name, each in times.items():
        print(
            f"{args.model}, {args.requests} x {args.context}, {name}: {statistics.median(each):.3f} ms a step "
            f"({min(each):.3f} to {max(each):.3f}), {ratios[name]:.4f} of plain"
        )
    return ratios["in-process"] <= 1.01


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40, help="of each engine in a round")
    parser.add_argument("--kv-cache-gb", type=float, default=16, help="of each engine")
    parser.add_argument("--only", nargs="*", choices=list(ENGINES))
    parser.add_argument("-o", "--option", action="append", default=[])
    args = parser.parse_args()
    folder = SHAPES / args.model
    options: dict[str, Any] = {
        "model": str(folder) if folder.is_dir() else args.model,
        "load_format": "dummy" if folder.is_dir() else "auto",
        "max_model_len": 4096,
        "skip_tokenizer_init": True,
        "device": args.device,
        "kv_cache_bytes": int(args.kv_cache_gb * 1e9),
        **{key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in args.option)},
    }
    config = with_device_defaults(EngineConfig.from_options(**options), is_offline=True)
    return 0 if compare(config, args) else 1


if __name__ == "__main__":
    sys.exit(main())
