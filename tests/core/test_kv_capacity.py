"""Which groups can be served, and the longest request."""

from __future__ import annotations

import random
import sys

import pytest

from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.kv_capacity import longest_request
from headrace.errors import ConfigError
from tests.core.kv_simulation import full, sliding


@pytest.mark.parametrize(
    ("specs", "num_blocks", "block_size", "message"),
    [
        ([], 10, 4, "at least one KV group"),
        ([KVCacheSpec("state", (3,), 64)], 10, 4, "one state a request"),
        ([KVCacheSpec("sliding", (0,), 64)], 10, 4, "window None"),
        ([KVCacheSpec("sliding", (0,), 64, window=0)], 10, 4, "window 0"),
        ([KVCacheSpec("full", (0,), 64, window=8)], 10, 4, "'full' has window 8"),
        ([KVCacheSpec("full", (0,), 64), KVCacheSpec("full", (1,), 32)], 10, 4, r"got \[32, 64\]"),
        ([full()], 10, 0, "block_size must be at least 1 token; got 0"),
        ([full(0), full(1)], 1, 4, "1 KV blocks cannot serve 2 KV groups"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_value(
    specs: list[KVCacheSpec], num_blocks: int, block_size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        KVCacheManager(specs, num_blocks, block_size)


def test_latent_groups_are_full_ones() -> None:
    assert KVCacheManager([KVCacheSpec("latent", (0,), 64)], 10, 4).max_tokens_of_one_request() == 40


def test_sliding_groups_need_no_more_than_their_window() -> None:
    assert longest_request([full(), full()], 100, 16, 1) == 800
    assert longest_request([sliding(33)], 2, 16, 1) == 32
    # a token and the 32 before it touch 3 blocks at worst, for any length
    assert longest_request([sliding(33)], 3, 16, 1) == sys.maxsize
    assert longest_request([sliding(34)], 3, 16, 1) == 48
    assert longest_request([full(), sliding(33)], 100, 16, 1) == 97 * 16


def simulated_need(specs: list[KVCacheSpec], num_tokens: int, size: int, step: int) -> int:
    """Most blocks held while tokens are computed ``step`` at a time, old sliding blocks released in between."""
    most = 0
    for start in range(0, num_tokens, step):
        end = min(num_tokens, start + step)
        held = 0
        for spec in specs:
            first = 0 if spec.window is None else max(0, start - spec.window + 1) // size
            held += -(-end // size) - first
        most = max(most, held)
    return most


@pytest.mark.parametrize("seed", range(4))
def test_the_longest_request_always_fits(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        size, step = rng.choice([1, 4, 16]), rng.choice([1, 3, 16, 50])
        specs = [rng.choice([full(), sliding(rng.randint(1, 70))]) for _ in range(rng.randint(1, 4))]
        num_blocks = rng.randint(len(specs), 60)
        longest = longest_request(specs, num_blocks, size, step)
        assert simulated_need(specs, min(longest, 3000), size, step) <= num_blocks
        if longest < 3000 and all(spec.window is None for spec in specs):
            assert simulated_need(specs, longest + 1, size, step) > num_blocks
