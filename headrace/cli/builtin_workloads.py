"""The workloads that ``headrace bench`` knows by name: deterministic lists of requests, no tokenizer needed.

Seeds and the order of draws stay as they are, so that figures of different times and engines are of the same requests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from headrace.cli.workload import WorkloadRequest

SHAREGPT_LENGTHS = Path(__file__).parent / "data" / "sharegpt_lengths.json"
"""[[prompt tokens, answer tokens], …] of 4,000 ShareGPT V3 conversations."""

_FIRST_ID, _END_ID = 1000, 100_000
_SAMPLED = ("mix", "nano")
_SAMPLED_TEMPERATURE = 0.6


def make_workload(name: str, vocab_size: int = _END_ID) -> list[WorkloadRequest]:
    """The requests of a workload of ``BUILT_IN``; ids beyond a smaller vocabulary are folded into it."""
    requests = BUILT_IN[name]()
    if vocab_size < _END_ID:
        for request in requests:
            request.prompt_ids[:] = [token % vocab_size for token in request.prompt_ids]
    return requests


def temperature_of(name: str) -> float:
    """What the workload's answers are sampled with."""
    return _SAMPLED_TEMPERATURE if name in _SAMPLED else 0.0


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_FIRST_ID, _END_ID) for _ in range(count)]


def _mixed(count: int) -> list[WorkloadRequest]:
    """Prompts and answers of 100 to 1,024 tokens."""
    rng = random.Random(0)
    return [WorkloadRequest(_ids(rng, rng.randint(100, 1024)), rng.randint(100, 1024)) for _ in range(count)]


def _fixed(count: int, prompt: int, output: int, seed: int) -> list[WorkloadRequest]:
    rng = random.Random(seed)
    return [WorkloadRequest(_ids(rng, prompt), output) for _ in range(count)]


def _shared_prefix(count: int, prefix: int, own: int, output: int) -> list[WorkloadRequest]:
    rng = random.Random(3)
    head = _ids(rng, prefix)
    return [WorkloadRequest(head + _ids(rng, own), output) for _ in range(count)]


def _sharegpt(count: int) -> list[WorkloadRequest]:
    rng = random.Random(4)
    lengths = json.loads(SHAREGPT_LENGTHS.read_text())[:count]
    return [WorkloadRequest(_ids(rng, prompt), output) for prompt, output in lengths]


BUILT_IN: dict[str, Callable[[], list[WorkloadRequest]]] = {
    "single": lambda: _fixed(1, 128, 512, 1),
    "b64": lambda: _fixed(64, 1024, 256, 2),
    "sharegpt": lambda: _sharegpt(1000),
    "mix": lambda: _mixed(512),
    "prefix": lambda: _shared_prefix(256, 8192, 64, 128),
    "long": lambda: _fixed(4, 30000, 16, 2),
    "nano": lambda: _mixed(256),
    "d256": lambda: _fixed(256, 1024, 1024, 2),
}

SIZES: dict[str, tuple[int, int, int]] = {
    "single": (1, 128, 512),
    "b64": (64, 65_536, 16_384),
    "sharegpt": (1000, 245_572, 204_405),
    "mix": (512, 273_774, 298_762),
    "prefix": (256, 2_113_536, 32_768),
    "long": (4, 120_000, 64),
    "nano": (256, 141_884, 148_658),
    "d256": (256, 262_144, 262_144),
}
"""{name: (requests, tokens in, tokens out)}, for the help: drawing all requests takes a moment."""


def sizes_text() -> str:
    """All workloads with their sizes, thousands and millions rounded: "single 1/128/512, b64 64/66k/16k, …"."""
    return ", ".join(f"{name} {'/'.join(map(_short, size))}" for name, size in SIZES.items())


def _short(count: int) -> str:
    if count >= 1_000_000:
        return f"{count / 1e6:.1f}M"
    return f"{count / 1e3:.0f}k" if count > 1000 else str(count)  # "1000" requests are exact
