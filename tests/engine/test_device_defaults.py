"""Settings left open come to what suits the device; what the user set stays."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.config import EngineConfig, SchedulerConfig, SharingConfig
from headrace.core.cascade_floor import CascadeFloor
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.engine.device_defaults import CPU_FLOOR, cascade_floor, with_device_defaults
from headrace.errors import ConfigError
from headrace.platforms import base, cuda


def resolved(is_offline: bool = False, **options: Any) -> tuple[Any, ...]:
    scheduler = with_device_defaults(EngineConfig.from_options(**options), is_offline=is_offline).scheduler
    return (
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        scheduler.max_stall_ms,
        scheduler.max_steps_outstanding,
    )


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(num_gibibytes: int) -> None:
        monkeypatch.setattr(base, "device_type", lambda device: "cuda")
        monkeypatch.setattr(cuda, "gpu_memory_bytes", lambda: num_gibibytes << 30)

    return make


def test_a_gpu_that_is_not_there_is_told_before_it_is_asked_for_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "is_cuda_usable", lambda: False)
    with pytest.raises(ConfigError, match=r"device='cuda' was asked for, but .*use device='cpu'"):
        resolved(device="cuda")


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_cpu(is_offline: bool) -> None:
    assert resolved(is_offline, device="cpu") == (256, 2048, 200.0, 1)
    assert resolved(is_offline, device="cpu", pipeline_parallel_size=3)[3] == 6


def test_gpus(gpu_of: Any) -> None:
    gpu_of(139)
    assert resolved() == (512, 8192, 250.0, 2)
    assert resolved(is_offline=True) == (512, 8192, math.inf, 2)
    gpu_of(24)
    assert resolved() == (256, 2048, 250.0, 2)


def test_how_often_streams_send(gpu_of: Any) -> None:
    def interval(**options: Any) -> int | None:
        return with_device_defaults(EngineConfig.from_options(**options)).scheduler.stream_interval

    assert interval(device="cpu") is None and interval(device="cpu", stream_interval=3) == 3
    gpu_of(24)
    assert interval() == 1 and interval(stream_interval=3) == 3
    with pytest.raises(ConfigError, match=r"stream_interval must be in \[1, 1024\]; got 0; the nearest is 1"):
        interval(stream_interval=0)


def test_what_was_set_stays_and_the_rest_fits_it(gpu_of: Any) -> None:
    gpu_of(139)
    given = {"max_num_seqs": 7, "max_num_batched_tokens": 9, "max_stall_ms": 5.0, "max_steps_outstanding": 1}
    assert resolved(is_offline=True, **given) == (7, 9, 5.0, 1)
    assert resolved(max_num_batched_tokens=64)[:2] == (64, 64)
    assert resolved(max_num_seqs=10_000)[:2] == (10_000, 10_000)


def test_the_least_group_of_cascade(gpu_of: Any) -> None:
    def fewest(**options: Any) -> int | None:
        return with_device_defaults(EngineConfig.from_options(**options)).sharing.cascade_min_requests

    assert fewest(device="cpu") == 8 and fewest(device="cpu", cascade_min_requests=3) == 3
    gpu_of(24)
    assert fewest() == 2 and fewest(cascade_min_requests=5) == 5


def test_sections_without_a_device_fit_themselves() -> None:
    plain = SchedulerConfig()
    assert (plain.max_seats, plain.max_step_tokens, plain.stall_limit_ms) == (256, 2048, 250.0)
    assert SharingConfig().min_requests == 8
    assert SchedulerConfig(max_num_batched_tokens=64).max_seats == 64
    assert SchedulerConfig(max_num_seqs=4096).max_step_tokens == 4096
    assert (
        SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8, max_prefill_chunk=16).max_chunk_tokens
        == 16
    )
    with pytest.raises(ConfigError, match="at least max_num_seqs"):
        EngineConfig.from_options(max_num_batched_tokens=64, max_num_seqs=65)


@pytest.mark.parametrize(("num_kv_heads", "tokens"), [(8, 10_000), (2, 40_000), (32, 2_500)])
def test_a_gpu_needs_more_tokens_spared_where_they_are_small(
    gpu_of: Any, num_kv_heads: int, tokens: float
) -> None:
    """Whatever the size of blocks and however many layers a group has, padded ones too."""
    gpu_of(139)
    for block_size, layer_ids in ((16, tuple(range(32))), (64, (0, 1, -1))):
        bytes_per_block = len(layer_ids) * block_size * num_kv_heads * 2 * 128 * 2
        specs = [KVCacheSpec("full", layer_ids, bytes_per_block)]
        assert cascade_floor("auto", specs, block_size) == CascadeFloor(tokens, 128, 0.3)


def test_a_cpu_keeps_the_plain_floor_of_cascade() -> None:
    assert cascade_floor("cpu", [KVCacheSpec("full", (0,), 64)], 16) == CPU_FLOOR


def test_what_a_cpu_reads_together() -> None:
    """As measured: a few requests are not worth it; from sixteen on 256 shared tokens are."""
    assert not CPU_FLOOR.is_reached(256, 4, 256) and not CPU_FLOOR.is_reached(256, 8, 512)
    assert CPU_FLOOR.is_reached(512, 8, 4096) and CPU_FLOOR.is_reached(256, 16, 1024)
