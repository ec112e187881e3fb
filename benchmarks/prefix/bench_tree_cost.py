"""The radix tree's share of wall time while a model serves traces with shared prefixes, and the computing it saves.

    OMP_NUM_THREADS=2 python benchmarks/prefix/bench_tree_cost.py [--model smollm2] [--requests 60] [-o KEY=VALUE ...]

Counts the time inside the public methods of ``RadixCache`` (matching, locking, inserting, evicting), outermost calls
only, while the first requests of each trace run with answers of 16 tokens. The clock's own cost is counted with it.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from engine_runs import make_core, run
from traces import TRACES

from headrace.core.radix_cache import RadixCache

OUTPUT = 16


class Clock:
    """Time spent inside the methods that it wraps."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._depth = 0

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, timed unless another one is being timed."""

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return method(*args, **kwargs)
            self._depth = 1
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.total_s += time.perf_counter() - start
                self._depth = 0

        return timed


def watch_tree(clock: Clock) -> None:
    """Wrap every public method of the tree's cache."""
    for name, method in vars(RadixCache).items():
        if callable(method) and not name.startswith("_"):
            setattr(RadixCache, name, clock.wrap(method))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=60, help="of each trace")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("-o", "--option", action="append", default=[])
    args = parser.parse_args()
    clock = Clock()
    watch_tree(clock)
    core = make_core(args.model, args.option)
    for name in args.traces.split(","):
        prompts = [list(request.prompt) for request in TRACES[name]()[: args.requests]]
        clock.total_s = 0.0
        core.reset_prefix_cache()
        took = run(core, prompts, OUTPUT)
        total = sum(len(ids) for ids in prompts)
        computed = took.num_computed - len(prompts) * (OUTPUT - 1)
        print(
            f"{name:16s} {len(prompts)} requests in {took.wall_s:6.2f} s: tree {1e3 * clock.total_s:6.2f} ms, "
            f"{100 * clock.total_s / took.wall_s:.3f} % of wall time; computed {computed} of {total} prompt tokens, "
            f"{1 - computed / total:.1%} saved",
            flush=True,
        )
    core.shutdown()


if __name__ == "__main__":
    main()
