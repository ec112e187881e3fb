"""What the engine-level benchmarks of sharing have in common: a core, and a timed run of requests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import build_engine_core
from headrace.engine.engine_core import EngineCore
from headrace.sampling_params import SamplingParams

SHAPES = Path(__file__).parent.parent / "data" / "models"


def make_core(model: str, options: list[str], **settings: Any) -> EngineCore:
    """An engine core over a model, or over random weights for a shape of benchmarks/data/models."""
    folder = SHAPES / model
    chosen = {key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in options)}
    is_shape = folder.is_dir()
    return build_engine_core(
        EngineConfig.from_options(
            **{
                "model": str(folder) if is_shape else model,
                "load_format": "dummy" if is_shape else "auto",
                "skip_tokenizer_init": True,
                **settings,
                **chosen,
            }
        ),
        is_offline=True,
    )


@dataclass
class Run:
    """What a run took.

    peak_blocks: KV blocks held by requests at most.
    unshared_blocks: that the same requests would have held then, each for itself.
    first_s, finished_s: seconds until the first token and the end of each.
    """

    wall_s: float = 0.0
    num_output: int = 0
    peak_blocks: int = 0
    unshared_blocks: int = 0
    num_computed: int = 0
    first_s: list[float] = field(default_factory=list)
    finished_s: list[float] = field(default_factory=list)


def run(
    core: EngineCore,
    prompts: list[list[int]],
    num_output: int | list[int],
    watch: Callable[[], None] | None = None,
    **params: Any,
) -> Run:
    """All prompts at once, answers of fixed length: one for all, or each its own."""
    result, seen = Run(), set()
    before = core.stats().num_computed_tokens
    start = time.perf_counter()
    lengths = [num_output] * len(prompts) if isinstance(num_output, int) else num_output
    for number, (ids, length) in enumerate(zip(prompts, lengths, strict=True)):
        wanted = SamplingParams(
            **{"temperature": 0.0, "max_tokens": length, "ignore_eos": True, "seed": number, **params}
        )
        core.add_request(EngineCoreRequest(f"r{number}", ids, wanted, length))
    while core.has_work():
        for item in core.step():
            result.num_output += len(item.new_token_ids)
            if item.request_id not in seen and item.new_token_ids:
                seen.add(item.request_id)
                result.first_s.append(time.perf_counter() - start)
            if item.finish_reason is not None:
                result.finished_s.append(time.perf_counter() - start)
        held = core.stats().num_held_blocks
        if held > result.peak_blocks:
            result.peak_blocks, result.unshared_blocks = held, blocks_unshared(core)
        if watch is not None:
            watch()
    result.wall_s = time.perf_counter() - start
    result.num_computed = core.stats().num_computed_tokens - before
    return result


def blocks_unshared(core: EngineCore) -> int:
    """Entries of all requests' block tables: a shared block counts once for each of them."""
    alive = core.scheduler.lifecycle.requests.values()
    return sum(len(table) for request in alive for table in request.block_table)


def random_ids(rng: random.Random, count: int, vocab: int = 30_000) -> list[int]:
    """Tokens that mean nothing."""
    return [rng.randrange(1000, vocab) for _ in range(count)]
