"""Tile sizes of the attention kernels, by head dim and type, as measured on an H200 (benchmarks/NOTES.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from headrace.kernels.triton.attention_work import TileRows
from headrace.kernels.triton.launch import INTERPRETED

_REGISTERS, _MAX_REGISTERS, _WARP = 65536, 255, 32
"""Of a multiprocessor, of a thread at most; threads of a warp."""


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How a kernel is launched.

    block_m, block_n, num_stages: see ``TileConfig``.
    programs_per_multiprocessor: of the persistent grid: as many as shared memory holds. Registers are cut to fit: a
        program that waits for another to end would do its part of the work after all others.
    """

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int
    programs_per_multiprocessor: int

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of a launch."""
        share = _REGISTERS // (self.programs_per_multiprocessor * self.num_warps * _WARP)
        registers = min(share // 8 * 8, _MAX_REGISTERS)
        return {"num_warps": self.num_warps, "num_stages": 1, "maxnreg": registers}


_BRIEF = LaunchShape(16, 32, 3, 2, 8)
"""For many items of about 200 keys and heads of 128 numbers: 21 % faster than the usual, elsewhere 8 to 28 % slower."""


def has_brief_launch(group: int, head_dim: int) -> bool:
    """Whether brief work is launched in a way of its own, in 16-bit numbers."""
    return 64 < head_dim <= 128 and _short_block_m(group) == _BRIEF.block_m


def short_launch(
    group: int,
    block_d: int,
    dtype: torch.dtype,
    *,
    is_quantized: bool = False,
    is_coded: bool = False,
    is_brief: bool = False,
) -> LaunchShape:
    """For tiles of few rows: the more bytes on their way the better.

    is_quantized: the cache is; is_coded: and ``coded_tiles_kernel``, which reads ahead by itself, takes it.
    is_brief: the work is (``PackedWork``).
    """
    block_m = _short_block_m(group)
    if dtype == torch.float32:
        return LaunchShape(block_m, 16, 2, 4, 4)
    if block_d <= 64:
        return LaunchShape(block_m, 128, 3, 4, 3)
    if is_quantized and block_d <= 128:
        return LaunchShape(block_m, 128, 1 if is_coded else 2, 4, 2)
    if is_brief and has_brief_launch(group, block_d):
        return _BRIEF
    if block_d <= 128:
        return LaunchShape(block_m, 64, 2, 4, 4)
    return LaunchShape(block_m, 32, 3, 4, 3)


def _short_block_m(group: int) -> int:
    return max(16, triton.next_power_of_2(TileRows.for_group(group).short * group))


def long_launch(head_dim: int, block_d: int, dtype: torch.dtype) -> LaunchShape:
    """For tiles of many rows: the larger the better, as long as registers and shared memory hold them."""
    if INTERPRETED:
        return LaunchShape(64, 32, 2, 4, 1)  # several subtiles an item, several rounds a subtile
    if dtype == torch.float32:
        return LaunchShape(16, 32, 2, 4, 4)
    if block_d <= 64:
        return LaunchShape(128, 128, 3, 8, 2)
    if block_d <= 128:
        return LaunchShape(128, 64, 2, 8, 2)
    return LaunchShape(128, 64, 2, 8, 1)
