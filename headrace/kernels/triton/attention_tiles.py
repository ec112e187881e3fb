"""Tile sizes of the attention kernels, by head dim and type, as measured on an H200 (benchmarks/NOTES.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from headrace.kernels.triton.attention_work import TileRows
from headrace.kernels.triton.launch import INTERPRETED


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How a kernel is launched.

    block_m, block_n, num_stages: see ``TileConfig``.
    programs_per_multiprocessor: of the persistent grid: as many as shared memory and registers hold.
    """

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int
    programs_per_multiprocessor: int


def short_launch(group: int, block_d: int, dtype: torch.dtype) -> LaunchShape:
    """For tiles of few rows: the more bytes on their way the better."""
    block_m = max(16, triton.next_power_of_2(TileRows.for_group(group).short * group))
    if dtype == torch.float32:
        return LaunchShape(block_m, 16, 2, 4, 4)
    if block_d <= 64:
        return LaunchShape(block_m, 128, 3, 4, 3)
    if block_d <= 128:
        return LaunchShape(block_m, 64, 3, 4, 3)
    return LaunchShape(block_m, 32, 3, 4, 3)


def long_launch(head_dim: int, block_d: int, dtype: torch.dtype) -> LaunchShape:
    """For tiles of many rows: the larger the better, as long as registers and shared memory hold them."""
    if INTERPRETED:
        return LaunchShape(64, 32, 2, 4, 1)  # several subtiles an item, several rounds a subtile
    if dtype == torch.float32:
        return LaunchShape(16, 32, 2, 4, 4)
    if block_d <= 64:
        return LaunchShape(128, 128, 3, 8, 2)
    if block_d <= 128:
        return LaunchShape(128, 128, 2, 8, 1)
    return LaunchShape(128, 64, 2, 8, 1)
