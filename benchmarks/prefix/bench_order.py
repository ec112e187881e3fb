"""Hit rate of the order of serving: six traces, all requests waiting at once, against a depth-first walk of their tree.

    python benchmarks/prefix/bench_order.py [--block-size 16] [--traces few-shot,rag]

The optimum computes every prefix once (what a depth-first walk does when the pool holds the longest request). It is
counted in whole blocks, as "of it" is, and token by token, with which "with copies" is compared: whole blocks and the
tokens copied from blocks that match in part. One request runs at a time, so that the order alone is measured.
"us/pick" is the CPU time of choosing a request.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.prefix.bench_prefix_reuse import SHARES, Replay, pool_blocks, simulate
from benchmarks.prefix.traces import TRACES, TraceRequest
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.policy import Policy, WaitingQueue
from headrace.core.prefix_order import PrefixFirstQueue
from headrace.core.request import Request
from headrace.sampling_params import SamplingParams


def serve(trace: Sequence[TraceRequest], num_blocks: int, block_size: int, policy_name: str) -> Replay:
    """Serve the whole trace in the policy's order; ``seconds`` is what choosing took."""
    kv = KVCacheManager([KVCacheSpec("full", (0,), 64)], num_blocks, block_size)
    policy, result = Policy(policy_name), Replay()
    queue = PrefixFirstQueue(policy, kv.cached_tokens) if policy.is_prefix_first else WaitingQueue(policy)
    answers = {}
    for number, item in enumerate(trace):
        request = Request(f"r{number}", list(item.prompt), SamplingParams(), max_tokens=len(item.answer))
        request.sequence = number
        answers[request] = item.answer
        queue.push(request)
    step_id = 0
    while True:
        started = time.thread_time()
        request = queue.peek()
        result.seconds += time.thread_time() - started
        if request is None:
            return result
        queue.remove(request)
        step_id += 1
        prompt, answer = request.num_tokens, answers[request]
        total = prompt + len(answer) - 1
        assert kv.admit(request, kv.match(request, prompt - 1), total, step_id)
        kv.take_block_copies()
        cached = request.num_computed_tokens
        request.last_step_id = step_id
        request.token_ids += answer
        request.num_computed_tokens = request.num_committed_tokens = total
        kv.commit(request)
        kv.advance(step_id)
        kv.free(request)
        result.num_requests += 1
        result.num_prompt_tokens += prompt
        result.num_copied_tokens += cached % block_size
        result.num_block_hit_tokens += cached - cached % block_size


def shared_tokens(trace: Sequence[TraceRequest]) -> int:
    """Prompt tokens that a depth-first walk finds computed, token by token; the last of a prompt is always computed."""
    tree: dict[int, Any] = {}
    found = 0
    for item in trace:
        node, is_known = tree, True
        for position, token in enumerate((*item.prompt, *item.answer[:-1])):
            is_known = is_known and token in node and position < len(item.prompt) - 1
            found += is_known
            node = node.setdefault(token, {})
    return found


def main() -> None:
    """Print one line per trace and pool size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--traces", default=",".join(TRACES))
    options = parser.parse_args()
    print(
        "trace            pool   blocks  optimum   fcfs of it   longest-prefix of it   by token   with copies   us/pick"
    )
    for name in options.traces.split(","):
        trace = TRACES[name]()
        # depth-first: sorted prompts visit the tree so; nothing is ever evicted
        walk = sorted(trace, key=lambda item: item.prompt)
        best, by_token = simulate(walk, 1 << 40, options.block_size), shared_tokens(walk)
        for share in SHARES:
            num_blocks = pool_blocks(trace, options.block_size, share)
            plain, ours = (
                serve(trace, num_blocks, options.block_size, p) for p in ("fcfs", "longest-prefix")
            )
            tokens, optimum = ours.num_prompt_tokens, best.num_hit_tokens
            print(
                f"{name:15} {share:5.0%} {num_blocks:8} {optimum / tokens:8.2%} "
                f"{plain.num_block_hit_tokens / optimum:12.2%} {ours.num_block_hit_tokens / optimum:22.2%} "
                f"{by_token / tokens:10.2%} {(ours.num_block_hit_tokens + ours.num_copied_tokens) / by_token:13.2%} "
                f"{1e6 * ours.seconds / ours.num_requests:9.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
