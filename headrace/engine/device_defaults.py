"""Settings that were left open and depend on the device or on who waits for the answers."""

from __future__ import annotations

import dataclasses
import math

from headrace.config import DEFAULT_SEATS, DEFAULT_STALL_MS, DEFAULT_STEP_TOKENS, EngineConfig

LARGE_GPU_BYTES = 70 << 30
"""From here on a step of 8192 tokens fits beside weights and KV blocks, and 512 streams have room."""
LARGE_GPU_SEATS = 512
LARGE_GPU_STEP_TOKENS = 8192


def with_device_defaults(config: EngineConfig, *, is_offline: bool = False) -> EngineConfig:
    """The same configuration with steps, seats and the longest stall filled in. What the user set stays.

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
    stall_ms = math.inf if is_gpu and is_offline else DEFAULT_STALL_MS
    scheduler = dataclasses.replace(
        scheduler,
        max_num_seqs=scheduler.max_num_seqs or min(seats, scheduler.max_num_batched_tokens or seats),
        max_num_batched_tokens=scheduler.max_num_batched_tokens
        or max(step_tokens, scheduler.max_num_seqs or 0),
        max_stall_ms=scheduler.max_stall_ms or stall_ms,
        max_steps_outstanding=scheduler.max_steps_outstanding or steps,
    )
    return dataclasses.replace(config, scheduler=scheduler)


def _room() -> tuple[int, int]:
    """(requests at once, tokens in a step) that suit the GPU."""
    from headrace.platforms.cuda import gpu_memory_bytes

    if gpu_memory_bytes() >= LARGE_GPU_BYTES:
        return LARGE_GPU_SEATS, LARGE_GPU_STEP_TOKENS
    return DEFAULT_SEATS, DEFAULT_STEP_TOKENS
