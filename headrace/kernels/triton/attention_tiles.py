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
    programs_per_multiprocessor: of the persistent grid: as many as shared memory holds, unless
    num_resident: so many of them run at a time, the others begin as those end, which evens out lengths of many units.
        None: all of them. Registers are cut to fit so many.
    """

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int
    programs_per_multiprocessor: int
    num_resident: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of a launch."""
        num_resident = self.num_resident or self.programs_per_multiprocessor
        share = _REGISTERS // (num_resident * self.num_warps * _WARP)
        registers = min(share // 8 * 8, _MAX_REGISTERS)
        return {"num_warps": self.num_warps, "num_stages": 1, "maxnreg": registers}


MANY_UNITS = 1024
"""A step's rows times KV heads from which ``_MANY`` is the faster launch."""

_MANY = LaunchShape(16, 32, 2, 2, 16, num_resident=8)
"""For heads of 65 to 128 numbers in 16 bits: a fifth to a quarter faster where contexts differ, as fast where they do
not; with 512 or fewer units a sixth slower (benchmarks/NOTES.md)."""


def short_launch(
    group: int,
    block_d: int,
    dtype: torch.dtype,
    row_units: int,
    *,
    is_quantized: bool = False,
    is_coded: bool = False,
) -> LaunchShape:
    """For tiles of few rows: the more bytes on their way the better.

    row_units: the step's rows times KV heads; any launch is right for any number.
    is_quantized: the cache is; is_coded: and ``coded_tiles_kernel``, which reads ahead by itself, takes it.
    """
    block_m = max(16, triton.next_power_of_2(TileRows.for_group(group).short * group))
    if dtype == torch.float32:
        return LaunchShape(block_m, 16, 2, 4, 4)
    if block_d <= 64:
        return LaunchShape(block_m, 128, 3, 4, 3)
    if is_quantized and block_d <= 128:
        return LaunchShape(block_m, 128, 1 if is_coded else 2, 4, 2)
    if block_d <= 128:
        is_many = row_units >= MANY_UNITS and block_m == _MANY.block_m
        return _MANY if is_many else LaunchShape(block_m, 64, 2, 4, 4)
    return LaunchShape(block_m, 32, 3, 4, 3)


def long_launch(block_d: int, dtype: torch.dtype) -> LaunchShape:
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
