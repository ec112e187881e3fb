"""When ``coded_ring_kernel`` takes decodes over 8-bit caches, and how it is launched, as measured on an H200."""

from __future__ import annotations

from typing import Any

from headrace.kernels.triton.attention_ring_codes import HEAD_DIM, SIXTEEN
from headrace.kernels.triton.attention_tiles import LaunchShape
from headrace.kernels.triton.launch import HOPPER_MULTIPROCESSORS, INTERPRETED, architecture

_ARCHITECTURE = 90

_FEW = LaunchShape(16, 128, 2, 4, 2)
_FULL = LaunchShape(16, 64, 3, 2, 4)
_MANY = LaunchShape(16, 32, 2, 1, 8)
"""Eight warps a multiprocessor each, of which a unit takes four, two or one. Each quarter of a multiprocessor has its
own registers, so of programs with one warp, of which it is told to hold no multiple of four, some do not run."""

_FEW_UNITS, _FULL_UNITS = range(17), range(257, 513)
"""Row units of the launches. They end at powers of two, as graphs' numbers of tokens do: a step's plan is for the
launch of its rows, a graph's launch for its own, rounded up."""
WARM_UNITS = (1, 32, 400)
"""Row units of a step of each launch, also if rounded up to the next multiple of a number of KV heads."""


def suits_ring(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether the kernel runs on this device and takes such heads."""
    has_heads = head_dim == HEAD_DIM and num_heads // num_kv_heads <= SIXTEEN.value
    return has_heads and not INTERPRETED and architecture() >= _ARCHITECTURE


def takes_ring(shape: dict[str, Any]) -> bool:
    """Whether the kernel can take 8-bit caches and tiles of this shape (the arguments of a ``TileConfig``)."""
    is_placed = all(shape[f"{name}_plane_codes"] % 64 == 0 for name in "kv")
    return (
        suits_ring(shape["num_heads"], shape["num_kv_heads"], shape["head_dim"])
        and shape["block_size"] % SIXTEEN.value == 0
        and is_placed
        and not shape["has_soft_cap"]
    )


def ring_launch(row_units: int) -> LaunchShape:
    """The launch, whose ``num_stages`` are slots of the ring: as many warps a unit as keep all programs busy.

    row_units: the step's rows times KV heads; any launch is right for any number. Few rows have their contexts cut
    into as many parts as fill the launch (``RingSplitRule``); where rows alone fill more than half of the programs
    of two warps, and no more than all, those are the fastest.
    """
    if row_units in _FEW_UNITS:
        return _FEW
    return _FULL if row_units in _FULL_UNITS else _MANY


def ring_wave(row_units: int) -> int:
    """Programs of that launch that run at a time."""
    return HOPPER_MULTIPROCESSORS * ring_launch(row_units).programs_per_multiprocessor
