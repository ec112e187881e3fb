"""How much of the allocated KV memory holds tokens, and what oversubscription costs.

    python benchmarks/core/bench_kv_use.py

Runs ShareGPT lengths (prompt and answer tokens) through the engine core over the fake executor with D = 2, and
prints: slots that hold tokens over slots of blocks that requests hold, averaged over
steps (blocks held only by the fence are reported apart); then, with a pool for half of what the requests need,
recomputed over useful tokens and the most often that one request was preempted.
"""

from __future__ import annotations

import argparse
import json
import random

from headrace.cli.builtin_workloads import SHAREGPT_LENGTHS
from headrace.config import SchedulerConfig
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import EngineCoreRequest
from headrace.core.scheduler import Scheduler
from headrace.engine.engine_core import EngineCore
from headrace.runtime.fake_executor import FakeExecutor
from headrace.sampling_params import SamplingParams

SPECS = [KVCacheSpec("full", (0,), 1)]


def run(
    lengths: list[tuple[int, int]], num_blocks: int, block_size: int, max_tokens: int | None, seats: int
) -> None:
    rng = random.Random(0)
    ends: dict[str, int] = {}
    executor = FakeExecutor(
        SPECS,
        num_blocks,
        block_size,
        lag=1,
        verify=False,
        vocab_size=50000,
        next_token=lambda ids, _: len(ids) % 40000,
    )
    config = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=4096, max_steps_outstanding=2)
    core = EngineCore(Scheduler(config, KVCacheManager(SPECS, num_blocks, block_size)), executor, seed=0)
    for number, (prompt, output) in enumerate(lengths):
        ids = [rng.randrange(50000) for _ in range(prompt)]
        stop = None if max_tokens is None else [(prompt + output - 1) % 40000]
        limit = output if max_tokens is None else max(max_tokens, output)
        params = SamplingParams(max_tokens=limit, stop_token_ids=stop, temperature=0)
        core.add_request(EngineCoreRequest(f"r{number}", ids, params, limit))
        ends[f"r{number}"] = prompt + output
    shares, fenced, held_peak, most, steps = [], [], 0, 0, 0
    while core.has_work():
        for item in core.step():
            if item.timeline is not None:
                most = max(most, item.timeline.num_preemptions)
        steps += 1
        use = core.scheduler.kv.stats()
        if use.num_request_slots:
            shares.append(use.num_token_slots / use.num_request_slots)
            fenced.append(use.num_fenced_slots / (num_blocks * block_size))
            held_peak = max(held_peak, use.num_request_slots // block_size)
    stats = core.stats()
    useful = stats.num_computed_tokens - stats.num_recomputed_tokens
    print(
        f"pool {num_blocks} blocks of {block_size}, {len(lengths)} requests, {steps} steps: "
        f"slots holding tokens {100 * sum(shares) / len(shares):.2f} %, fenced {100 * sum(fenced) / len(fenced):.2f} % "
        f"of the pool, peak held {held_peak}, preemptions {stats.num_preemptions} (most of one request {most}), "
        f"recomputed / useful {100 * stats.num_recomputed_tokens / useful:.2f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seats", type=int, default=256)
    args = parser.parse_args()
    lengths = [(p, o) for p, o in json.loads(SHAREGPT_LENGTHS.read_text())][: args.requests]
    print("roomy:")
    run(lengths, 12000, 16, None, args.seats)
    print(
        "a pool for half of what 256 requests take at their ends, answers' lengths known (max_tokens exact):"
    )
    need = sum(-(-(p + o) // 16) for p, o in lengths) * args.seats // len(lengths)
    run(lengths, need // 2, 16, None, args.seats)
    print("the same, lengths unknown (max_tokens 2048 or more, answers stop by a stop token):")
    run(lengths, need // 2, 16, 2048, args.seats)


if __name__ == "__main__":
    main()
