"""Hit rate of the prefix cache on six traces against an exact LRU simulator, and what the tree costs.

    python benchmarks/prefix/bench_prefix_reuse.py [--block-size 16] [--traces few-shot,rag]

Requests run one after another, as in the simulator. "hits" are whole blocks only, as the simulator counts; "copied"
are further tokens from blocks that match in part. Times are CPU time of all manager calls of a request: match, admit,
commit, free.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.prefix.lru_simulator import BlockLRU
from benchmarks.prefix.traces import TRACES, TraceRequest
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.request import Request
from headrace.sampling_params import SamplingParams

SHARES = (0.25, 0.5, 1.0)


@dataclass
class Replay:
    """What a trace got from the cache."""

    num_prompt_tokens: int = 0
    num_block_hit_tokens: int = 0
    num_copied_tokens: int = 0
    seconds: float = 0.0
    num_requests: int = 0


def replay(
    trace: Sequence[TraceRequest], num_blocks: int, block_size: int, min_copy_tokens: int = 4
) -> Replay:
    """Run the trace through a manager with one full KV group."""
    kv = KVCacheManager(
        [KVCacheSpec("full", (0,), 64)], num_blocks, block_size, min_copy_tokens=min_copy_tokens
    )
    params, result = SamplingParams(), Replay()
    for step_id, item in enumerate(trace, 1):
        request = Request(f"r{step_id}", list(item.prompt), params, max_tokens=len(item.answer))
        total = len(item.prompt) + len(item.answer) - 1
        started = time.thread_time()
        match = kv.match(request, len(item.prompt) - 1)
        admitted = kv.admit(request, match, total, step_id)
        assert admitted, f"{num_blocks} blocks are too few for {total} tokens"
        kv.take_block_copies()
        num_cached = request.num_computed_tokens
        request.last_step_id = step_id
        request.num_computed_tokens = request.num_committed_tokens = len(item.prompt)
        kv.commit(request)
        result.seconds += time.thread_time() - started
        request.token_ids += item.answer
        started = time.thread_time()
        request.num_computed_tokens = request.num_committed_tokens = total
        kv.commit(request)
        kv.advance(step_id)
        kv.free(request)
        result.seconds += time.thread_time() - started
        result.num_requests += 1
        result.num_prompt_tokens += len(item.prompt)
        result.num_copied_tokens += num_cached % block_size
        result.num_block_hit_tokens += num_cached - num_cached % block_size
    return result


def simulate(trace: Sequence[TraceRequest], num_blocks: int, block_size: int) -> BlockLRU:
    """Run the trace through the simulator."""
    simulator = BlockLRU(num_blocks, block_size)
    for item in trace:
        simulator.serve(item.prompt, item.answer)
    return simulator


def tree_blocks(trace: Sequence[TraceRequest], block_size: int) -> int:
    """Blocks that hold the whole trace, each prefix once, beside the longest request."""
    simulator = simulate(trace, 1 << 40, block_size)
    longest = max(len(item.prompt) + len(item.answer) for item in trace)
    return len(simulator._blocks) + longest // block_size + 2


def pool_blocks(trace: Sequence[TraceRequest], block_size: int, share: float) -> int:
    """Blocks of a pool that holds this share of the trace's tree, and at least its longest request."""
    longest = max(len(item.prompt) + len(item.answer) for item in trace)
    return max(int(tree_blocks(trace, block_size) * share), longest // block_size + 2)


def main() -> None:
    """Print one line per trace and pool size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--traces", default=",".join(TRACES))
    options = parser.parse_args()
    print("trace            pool   blocks   LRU %  hits %  of LRU copied % us/request us/1k tokens")
    for name in options.traces.split(","):
        trace = TRACES[name]()
        for share in SHARES:
            num_blocks = pool_blocks(trace, options.block_size, share)
            ideal = simulate(trace, num_blocks, options.block_size)
            real = replay(trace, num_blocks, options.block_size)
            rate, tokens = real.num_block_hit_tokens / max(1, ideal.num_hit_tokens), real.num_prompt_tokens
            print(
                f"{name:15} {share:5.0%} {num_blocks:8} {ideal.num_hit_tokens / tokens:7.2%} "
                f"{real.num_block_hit_tokens / tokens:7.2%} {rate:7.2%} {real.num_copied_tokens / tokens:8.2%} "
                f"{real.seconds / real.num_requests * 1e6:10.1f} {real.seconds / tokens * 1e9:12.1f}"
            )


if __name__ == "__main__":
    main()
