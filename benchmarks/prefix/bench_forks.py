"""KV memory of beams and of samples of one prompt, counted each step: what was saved, and what could have been.

    python benchmarks/prefix/bench_forks.py smollm2                                   # beams, Alpaca's mean lengths
    python benchmarks/prefix/bench_forks.py smollm2 --lengths sharegpt --requests 4   # beams, ShareGPT's lengths
    python benchmarks/prefix/bench_forks.py samples [--requests 200]                  # n = 2 to 6, ShareGPT's lengths

saved: 1 - blocks held / blocks of the same sequences unshared.

Beams: the optimum is that of the recorded tree: every block whose tokens, from the first on, are the same is there
once; blocks that differ later are counted apart, as they must be. Prompts are pieces of a text. Samples: the value
computed from the lengths: whole blocks of the prompt once, all others once for each answer. They need no model: the
engine core runs over a pretended device, which checks every block's contents.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from engine_runs import make_core, random_ids, run

from headrace.cli.builtin_workloads import SHAREGPT_LENGTHS
from headrace.config import SchedulerConfig
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.engine.engine_core import EngineCore
from headrace.runtime.fake_executor import FakeExecutor

TEXT = Path(__file__).parents[1] / "data" / "python_reference.txt"
ALPACA = (19, 58)
"""Mean tokens of Alpaca's prompts and answers."""


class BlockCounter:
    """Sums over steps of blocks held, needed at best, and needed without sharing.

    best_of: blocks needed at best by the requests of a step.
    """

    def __init__(self, core: EngineCore, best_of: Callable[[list[Request], int], int]) -> None:
        self._core = core
        self._best_of = best_of
        self.held = self.best = self.unshared = 0

    def __call__(self) -> None:
        size = self._core.scheduler.kv.block_size
        alive = self._core.scheduler.lifecycle.requests.values()
        requests = [request for request in alive if request.block_table and request.num_output_tokens]
        self.held += len({block for request in requests for block in request.block_table[0]})
        self.unshared += sum(-(-request.capacity_tokens // size) for request in requests)
        self.best += self._best_of(requests, size)

    def line(self) -> str:
        ours, best = (1 - count / self.unshared for count in (self.held, self.best))
        return f"saved {ours:6.1%}, at best {best:6.1%}, {100 * (best - ours):+.2f} points short"


def of_tree(requests: list[Request], size: int) -> int:
    """Blocks of the tree that the requests' tokens make; the last token known is what the next step writes."""
    prefixes = set()
    for request in requests:
        key = 0
        for start in range(0, request.capacity_tokens, size):
            tokens = request.token_ids[start : start + size]
            key = hash((key, *tokens)) if tokens else hash((key, request.request_id, start))
            prefixes.add(key)
    return len(prefixes)


def of_lengths(requests: list[Request], size: int) -> int:
    """Whole blocks of each prompt once, and each answer's own blocks."""
    own = sum(-(-request.capacity_tokens // size) - request.num_prompt_tokens // size for request in requests)
    return own + sum({request.parent_id: request.num_prompt_tokens // size for request in requests}.values())


def make_prompts(model: str, lengths: list[int]) -> list[list[int]]:
    """Pieces of a text where the model has a tokenizer, else tokens that mean nothing."""
    from headrace.checkpoint.source import resolve_model
    from headrace.errors import HeadraceError
    from headrace.tokenizer import load_tokenizer

    rng = random.Random(0)
    try:
        ids = load_tokenizer(resolve_model(model)).encode(TEXT.read_text())
    except HeadraceError:
        return [random_ids(rng, length) for length in lengths]
    starts = [rng.randrange(len(ids) - length) for length in lengths]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def beams(args: argparse.Namespace, lengths: list[tuple[int, int]]) -> None:
    """One line a width."""
    core = make_core(args.model, args.option)
    prompts = make_prompts(args.model, [prompt for prompt, _ in lengths])
    for width in args.widths:
        core.reset_prefix_cache()
        counter = BlockCounter(core, of_tree)
        outputs = [output for _, output in lengths]
        run(core, prompts, outputs, counter, use_beam_search=True, n=1, best_of=width)
        print(f"{width} beams    {counter.line()}", flush=True)
    core.shutdown()


def samples(args: argparse.Namespace, lengths: list[tuple[int, int]]) -> None:
    """One line for each n."""
    specs, num_blocks = [KVCacheSpec("full", (0,), 1)], 60_000
    for n in range(2, 7):
        config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=4096, max_steps_outstanding=2)
        executor = FakeExecutor(specs, num_blocks, 16, lag=1, vocab_size=50_000)
        core = EngineCore(Scheduler(config, KVCacheManager(specs, num_blocks, 16)), executor, seed=0)
        rng, counter = random.Random(n), BlockCounter(core, of_lengths)
        prompts = [random_ids(rng, prompt) for prompt, _ in lengths]
        run(core, prompts, [output for _, output in lengths], counter, n=n, temperature=1.0)
        print(f"{n} samples  {counter.line()}", flush=True)


def main() -> None:
    """Print one line a width."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a model for beams, or the word samples")
    parser.add_argument("--requests", type=int, help="8 of beams, 200 of samples")
    parser.add_argument("--lengths", choices=["alpaca", "sharegpt"], default="alpaca", help="of beams")
    parser.add_argument("--most", type=int, default=512, help="tokens of prompt and answer of a beam at most")
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("-o", "--option", action="append", default=[], help="engine option as KEY=VALUE")
    args = parser.parse_args()
    pairs = [(prompt, output) for prompt, output in json.loads(SHAREGPT_LENGTHS.read_text())]
    if args.model == "samples":
        samples(args, pairs[: args.requests or 200])
        return
    rng, count = random.Random(0), args.requests or 8
    if args.lengths == "alpaca":
        beams(args, [(rng.randint(ALPACA[0] // 2, 3 * ALPACA[0] // 2), ALPACA[1]) for _ in range(count)])
    else:
        beams(args, [pair for pair in pairs if sum(pair) <= args.most][:count])


if __name__ == "__main__":
    main()
