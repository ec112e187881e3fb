"""Each example program against the same calls in sequence and without sharing.

    python benchmarks/lang/bench_programs.py [--model smollm2] [--repeats 3] [--only NAME,NAME]

"shared": as the language runs it. "naive": one call after the other, each choice scored by a call of its own, no prefix
cache. Runs alternate; the first of each is not counted. Results must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from headrace import lang
from headrace.lang.backend import Generated
from headrace.lang.conversation import Conversation

FOLDER = Path(__file__).parents[2] / "examples" / "lang"


class NaiveBackend(lang.Backend):
    """One call at a time over another backend, which it ends with itself."""

    def __init__(self, inner: lang.Backend) -> None:
        super().__init__()
        self._inner = inner
        self._turn = asyncio.Lock()

    async def generate(
        self, conversation: Conversation, spec: lang.GenSpec, on_text: Callable[[str], None] | None = None
    ) -> Generated:
        async with self._turn:
            return await asyncio.wrap_future(
                self._inner.submit(self._inner.generate(conversation, spec, on_text))
            )

    async def score(self, conversation: Conversation, choices: Sequence[str]) -> list[float]:
        scores: list[float] = []
        async with self._turn:
            for choice in choices:
                scores += await asyncio.wrap_future(
                    self._inner.submit(self._inner.score(conversation, [choice]))
                )
        return scores

    async def warm(self, conversation: Conversation) -> None:
        pass

    async def close_model(self) -> None:
        self._inner.shutdown()


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def timed(example: ModuleType, model: lang.Backend) -> tuple[float, object]:
    start = time.perf_counter()
    result = example.run(model)
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="names of examples, comma-separated")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    examples = [load(path) for path in sorted(FOLDER.glob("*.py")) if not only or path.stem in only]
    print(f"{'program':26} {'shared s':>9} {'naive s':>9} {'speed-up':>9}  results")
    with (
        lang.local(options.model) as shared,
        NaiveBackend(lang.local(options.model, enable_prefix_caching=False)) as naive,
    ):
        for example in examples:
            times: dict[str, list[float]] = {"shared": [], "naive": []}
            results = {}
            for repeat in range(options.repeats + 1):
                for name, model in (("shared", shared), ("naive", naive)):
                    seconds, results[name] = timed(example, model)
                    if repeat:
                        times[name].append(seconds)
            fast, slow = (statistics.median(times[name]) for name in ("shared", "naive"))
            is_equal = "equal" if results["shared"] == results["naive"] else "DIFFERENT"
            print(
                f"{example.__name__:26} {fast:9.2f} {slow:9.2f} {slow / fast:8.2f}x  {is_equal}", flush=True
            )


if __name__ == "__main__":
    main()
