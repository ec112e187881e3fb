"""The fixed GPU workloads: lists of (prompt token ids, output length), deterministic, no tokenizer needed.

Same seeds and order of draws as the peers were measured with, so that requests are identical.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

Workload = list[tuple[list[int], int]]
LENGTHS = Path(__file__).parent.parent / "data" / "sharegpt_lens.json"


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 100000) for _ in range(count)]


def random_mix(count: int) -> Workload:
    rng = random.Random(0)
    return [(random_ids(rng, rng.randint(100, 1024)), rng.randint(100, 1024)) for _ in range(count)]


def fixed(count: int, prompt: int, output: int, seed: int) -> Workload:
    rng = random.Random(seed)
    return [(random_ids(rng, prompt), output) for _ in range(count)]


def shared_prefix(count: int, prefix: int, own: int, output: int) -> Workload:
    rng = random.Random(3)
    head = random_ids(rng, prefix)
    return [(head + random_ids(rng, own), output) for _ in range(count)]


def sharegpt(count: int) -> Workload:
    rng = random.Random(4)
    return [(random_ids(rng, prompt), output) for prompt, output in json.loads(LENGTHS.read_text())[:count]]


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "single": lambda: fixed(1, 128, 512, 1),
    "mix": lambda: random_mix(512),
    "sharegpt": lambda: sharegpt(1000),
    "prefix": lambda: shared_prefix(256, 8192, 64, 128),
    "long": lambda: fixed(4, 30000, 16, 2),
    "nano": lambda: random_mix(256),
    "d256": lambda: fixed(256, 1024, 1024, 2),
    "b64": lambda: fixed(64, 1024, 256, 2),
}
