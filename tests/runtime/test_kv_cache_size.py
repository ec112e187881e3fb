"""Sizing of the KV memory, and its error."""

from __future__ import annotations

import logging

import pytest

from headrace.config import CacheConfig
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.errors import ConfigError
from headrace.runtime.kv_cache_size import RequestSize, cpu_budget_bytes, num_kv_blocks

FULL = KVCacheSpec("full", (0,), 1 << 20)
SLIDING = KVCacheSpec("sliding", (1,), 1 << 20, window=100)


def size(max_model_len: int = 1000, *specs: KVCacheSpec, in_flight: int = 64) -> RequestSize:
    return RequestSize(specs or (FULL,), 16, max_model_len, in_flight)


@pytest.mark.parametrize("specs", [(FULL,), (FULL, SLIDING), (SLIDING,), (FULL, SLIDING, SLIDING)])
@pytest.mark.parametrize("num_blocks", [3, 10, 20, 63, 64, 200])
def test_agrees_with_the_kv_cache_manager(specs: tuple[KVCacheSpec, ...], num_blocks: int) -> None:
    one = size(4096, *specs)
    manager = KVCacheManager(list(specs), num_blocks, 16)
    most = min(4096, manager.max_tokens_of_one_request(64))
    assert one.tokens_in(num_blocks) == most
    assert most == 0 or one.blocks(most) <= num_blocks
    assert most == 4096 or one.blocks(most + 1) > num_blocks


def test_bytes_are_turned_into_blocks() -> None:
    assert num_kv_blocks(CacheConfig(), size(), 100 << 20, "free memory") == 100
    assert num_kv_blocks(CacheConfig(kv_cache_bytes=(70 << 20) + 5), size(), 1, "free memory") == 70


def test_too_little_memory_names_the_tokens_and_the_setting() -> None:
    with pytest.raises(
        ConfigError, match=r"hold 160 tokens .* max_model_len to 160 or less, or raise kv_cache_bytes"
    ):
        num_kv_blocks(CacheConfig(kv_cache_bytes=10 << 20), size(), 1 << 40, "free memory")
    with pytest.raises(ConfigError, match=r"\(free memory\) hold 160 tokens .* or raise kv_cache_bytes"):
        num_kv_blocks(CacheConfig(), size(), 10 << 20, "free memory")
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization.* hold 0 tokens"):
        num_kv_blocks(CacheConfig(), size(), -5, "gpu_memory_utilization")
    with pytest.raises(ConfigError, match=r"hold 0 tokens .* needs 63.0 MiB; 63 MiB lack, 0 tokens fit$"):
        num_kv_blocks(
            CacheConfig(),
            size(),
            -5,
            "gpu_memory_utilization",
            lambda needed, fits: f"{needed >> 20} MiB lack, {fits} tokens fit",
        )


def test_blocks_asked_for_are_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert num_kv_blocks(CacheConfig(num_kv_blocks=500), size(), 0, "free memory") == 500
        assert not caplog.records
        assert num_kv_blocks(CacheConfig(num_kv_blocks=5), size(), 0, "free memory") == 5
    assert "holds 80 tokens of one request" in caplog.text


def test_cpu_default() -> None:
    gib = 1 << 30
    assert cpu_budget_bytes(100 * gib, gib) == 2 * gib
    assert cpu_budget_bytes(5 * gib, gib // 2) == gib
    assert cpu_budget_bytes(5 * gib, 2 * gib) == 2 * gib, "one request is worth more than the default share"
    assert cpu_budget_bytes(5 * gib, 4 * gib) == int(2.5 * gib)
