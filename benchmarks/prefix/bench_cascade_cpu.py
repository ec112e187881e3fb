"""From how much sharing on does cascade make decode steps of a CPU faster?

    OMP_NUM_THREADS=2 python benchmarks/prefix/bench_cascade_cpu.py smollm2 [-o dtype=bfloat16]

Twelve mixes of shared tokens, requests and own tokens; both engines in turn, the median time of the native program of a
decode step. Last column: would ``cascade: auto`` read the span together (floor and limits, without the cost model)?
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from headrace.config import EngineConfig, SharingConfig
from headrace.engine.device_defaults import CPU_FLOOR
from headrace.engine.llm import LLM
from headrace.kernels.native.program import Program
from headrace.sampling_params import SamplingParams

MIXES = (
    (64, 4, 64),
    (128, 2, 64),
    (256, 2, 64),
    (256, 4, 64),
    (256, 8, 64),
    (256, 8, 256),
    (256, 8, 768),
    (512, 4, 64),
    (512, 8, 512),
    (256, 16, 64),
    (256, 16, 512),
    (256, 32, 32),
)
"""(shared tokens, requests, tokens of its own that each has)."""

ROUNDS = 3
PARAMS = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
Timed = list[tuple[int, float]]


def timed(run: Callable[[Program, Any], Any], log: Timed) -> Callable[[Program, Any], Any]:
    """The same, noting (rows, seconds)."""

    def go(program: Program, batch: Any) -> Any:
        start = time.perf_counter()
        result = run(program, batch)
        log.append((batch.num_tokens, time.perf_counter() - start))
        return result

    return go


def is_taken(shared: int, requests: int, own: int) -> bool:
    """What "auto" decides before it has a cost model."""
    limits = SharingConfig()
    if shared < limits.cascade_min_tokens or requests < limits.min_requests:
        return False
    return CPU_FLOOR.is_reached(shared, requests, own * requests)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("-o", "--option", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    options = dict(option.split("=", 1) for option in args.option)
    engines = {
        mode: LLM.from_config(EngineConfig.from_options(model=args.model, cascade=mode, **options))
        for mode in ("on", "off")
    }
    log: Timed = []
    Program.run = timed(Program.run, log)  # type: ignore[method-assign, assignment]
    rng = random.Random(0)
    for shared, requests, own in MIXES:
        prefix = [rng.randrange(1000, 40000) for _ in range(shared)]
        prompts: list[Any] = [
            {"prompt_token_ids": prefix + [rng.randrange(1000, 40000) for _ in range(own)]}
            for _ in range(requests)
        ]
        times: dict[str, list[float]] = {mode: [] for mode in engines}
        for _ in range(ROUNDS):
            for mode, llm in engines.items():
                log.clear()
                llm.generate(prompts, PARAMS, use_tqdm=False)
                times[mode] += [seconds for rows, seconds in log if rows == requests][2:]
        on, off = (1e3 * statistics.median(times[mode]) for mode in engines)
        print(
            f"{shared:4d} shared, {requests:2d} requests, {own:3d} own: on {on:6.2f} ms, off {off:6.2f} ms, "
            f"{off / on:.3f}x, {'auto takes it' if is_taken(shared, requests, own) else ''}",
            flush=True,
        )


if __name__ == "__main__":
    main()
