"""What a device can do at most, measured with plain operations in a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.platforms.base import Platform

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
_MATRIX_SIDE = {"cuda": 8192, "cpu": 768}
_NUM_RUNS = 5


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """bytes_per_s: read and written by a copy.  flops_per_s: of a square matrix product."""

    bytes_per_s: float
    flops_per_s: float


@torch.inference_mode()
def measure_limits(platform: Platform, dtype: torch.dtype) -> DeviceLimits:
    """The better of a few runs each, in ``dtype``. Needs about 1.5 GiB on a GPU."""
    device = platform.device
    source = torch.ones(_COPY_BYTES[platform.name] // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _best_s(platform, lambda: target.copy_(source))
    side = _MATRIX_SIDE[platform.name]
    # random data: the power that a product takes, and with it the clock, depend on the numbers
    left = torch.randn(side, side, dtype=torch.float32, device=device).to(dtype)
    product = torch.empty_like(left)
    product_s = _best_s(platform, lambda: torch.mm(left, left, out=product))
    return DeviceLimits(2 * source.numel() / copy_s, 2 * side**3 / product_s)


def _best_s(platform: Platform, call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_NUM_RUNS):
        start, end = platform.new_event(), platform.new_event()
        start.record()
        call()
        end.record()
        end.wait()
        times.append(start.elapsed_ms(end) / 1e3)
    return max(min(times), 1e-9)
