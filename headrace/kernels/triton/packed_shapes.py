"""Tiles of the kernels of packed weights, and which of them a product takes."""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True, slots=True)
class PackedRowShape:
    """Tile of the one-row kernel: outputs a program, words of a row in one round."""

    block_n: int
    block_w: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class PackedTileShape:
    """Tile of the kernel of several rows.

    block_t: rows of x, padded.  block_n: outputs a program.
    num_stages: rounds in flight, of a chunk each.
    num_splits: parts of the inputs, each a program's, where there are too few outputs to fill the device.
    """

    block_t: int
    block_n: int
    num_stages: int
    num_warps: int
    num_splits: int = 1


@dataclass(frozen=True, slots=True)
class DecodedShape:
    """Decoding into memory, so many bytes of weights at a time, each multiplied by cuBLAS."""

    num_bytes: int


def row_shape(num_words: int, bits: int, group_columns: int) -> PackedRowShape:
    """As measured on an H200 (``bench_quant.py --variants``, 6144 x 4096): few scales leave room for more outputs."""
    if bits == 8:
        return PackedRowShape(4, min(512, triton.next_power_of_2(num_words)), 4)
    return PackedRowShape(8 if group_columns > 32 else 4, min(256, triton.next_power_of_2(num_words)), 2)


def tile_shape(num_rows: int, num_outputs: int, num_words: int) -> PackedTileShape:
    """As measured likewise: all rows in one tile, so that weights are decoded once, and programs to fill the device."""
    rows = triton.next_power_of_2(num_rows)
    if rows <= 32:
        block_t, block_n, stages, warps, wanted = max(16, rows), 64, 6 if rows <= 16 else 5, 4, 400
    else:
        block_t, block_n, stages, warps = min(rows, 128), 128, 4, 8
        wanted = 200 if rows == 64 else 100
    programs = triton.cdiv(num_outputs, block_n) * triton.cdiv(num_rows, block_t)
    splits = max(1, min(8, wanted // programs, num_words // 128))
    return PackedTileShape(block_t, block_n, stages, warps, 1 << (splits.bit_length() - 1))
