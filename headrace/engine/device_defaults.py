"""Settings that were left open and depend on the device or on who waits for the answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from headrace.config import (
    DEFAULT_CASCADE_REQUESTS,
    DEFAULT_SEATS,
    DEFAULT_STALL_MS,
    DEFAULT_STEP_TOKENS,
    EngineConfig,
)
from headrace.core.cascade_floor import CascadeFloor
from headrace.core.kv_cache_spec import KVCacheSpec

LARGE_GPU_BYTES = 70 << 30
"""From here on a step of 8192 tokens fits beside weights and KV blocks, and 512 streams have room."""
LARGE_GPU_SEATS = 512
LARGE_GPU_STEP_TOKENS = 8192

CPU_STALL_MS = 200.0
"""A prompt's step is long there beside one of decodes, and a burst's streams wait for those of its other prompts."""

GPU_FLOOR = CascadeFloor(tokens=10_000, tokens_per_request=128, tokens_per_own_token=0.3)
"""Of cascade, fitted to a grid of 200 points on one H200 (``benchmarks/kernels/bench_cascade.py --grid``; 32 query and
8 KV heads of 128 in bf16): what it lets pass was at least 1.02x as fast as each request reading for itself."""
GPU_CASCADE_REQUESTS = 2
"""So few win there once the span is long: 4 of 4,096 tokens and more 1.3 to 2.1 times, 2 of 32,768 1.5 times."""
CPU_FLOOR = CascadeFloor(tokens=1024, tokens_per_request=100)
"""Nothing is launched there: of twelve mixes of shared and own tokens and requests, those that reach it decoded 1.03 to
1.24 times as fast on two cores, in bf16 and with 4-bit weights (``benchmarks/prefix/bench_cascade_cpu.py``)."""

GPU_FLOOR_TOKEN_BYTES = 4096
"""KV of one token in one layer there."""


def with_device_defaults(config: EngineConfig, *, is_offline: bool = False) -> EngineConfig:
    """The same configuration with steps, seats, the longest stall and cascade's least group filled in. What the
    user set stays.

    Only a GPU overlaps steps: on a CPU that would take the cores of the step itself. A pipeline has a step for each
    stage, and as many again on their way, so that no stage waits for the host.

    Args:
        is_offline: nobody watches the answers grow, so that on a GPU prompts are not cut for the sake of streams.
    """
    from headrace.platforms.base import device_type

    is_gpu = device_type(config.device.device) == "cuda"
    scheduler = config.scheduler
    num_stages = config.parallel.pipeline_parallel_size
    steps = 2 * num_stages if is_gpu or num_stages > 1 else 1
    seats, step_tokens = _room() if is_gpu else (DEFAULT_SEATS, DEFAULT_STEP_TOKENS)
    stall_ms = CPU_STALL_MS if not is_gpu else math.inf if is_offline else DEFAULT_STALL_MS
    scheduler = dataclasses.replace(
        scheduler,
        max_num_seqs=scheduler.max_num_seqs or min(seats, scheduler.max_num_batched_tokens or seats),
        max_num_batched_tokens=scheduler.max_num_batched_tokens
        or max(step_tokens, scheduler.max_num_seqs or 0),
        max_stall_ms=scheduler.max_stall_ms or stall_ms,
        max_steps_outstanding=scheduler.max_steps_outstanding or steps,
        stream_interval=scheduler.stream_interval or (1 if is_gpu else None),
    )
    fewest = GPU_CASCADE_REQUESTS if is_gpu else DEFAULT_CASCADE_REQUESTS
    sharing = dataclasses.replace(
        config.sharing, cascade_min_requests=config.sharing.cascade_min_requests or fewest
    )
    return dataclasses.replace(config, scheduler=scheduler, sharing=sharing)


def cascade_floor(
    device: Literal["auto", "cpu", "cuda"], specs: Sequence[KVCacheSpec], block_size: int
) -> CascadeFloor:
    """What a shared span must spare on this device, before the cost model has seen anything.

    On a GPU the fixed part is a time, about 10 us, in which it would read the more tokens the fewer bytes a token has
    (fewer KV heads, a part of them on each rank, quantized KV). The others are taken as shares of reading: what is done
    for a request's rows shrinks with a rank's heads as its KV does. A CPU has a floor of its own.

    Args:
        device: the user's word.
        specs: KV groups of one rank.
        block_size: tokens in a block.
    """
    from headrace.platforms.base import device_type

    if device_type(device) == "cpu":
        return CPU_FLOOR
    token_bytes = specs[0].bytes_per_block / (len(specs[0].layer_ids) * block_size)
    return dataclasses.replace(GPU_FLOOR, tokens=GPU_FLOOR.tokens * GPU_FLOOR_TOKEN_BYTES / token_bytes)


def _room() -> tuple[int, int]:
    """(requests at once, tokens in a step) that suit the GPU."""
    from headrace.platforms.cuda import gpu_memory_bytes

    if gpu_memory_bytes() >= LARGE_GPU_BYTES:
        return LARGE_GPU_SEATS, LARGE_GPU_STEP_TOKENS
    return DEFAULT_SEATS, DEFAULT_STEP_TOKENS
