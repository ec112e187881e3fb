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


def row_shape(num_outputs: int, num_words: int) -> PackedRowShape:
    """Few outputs need small tiles to fill the device."""
    if num_outputs >= 16384:
        return PackedRowShape(8, min(128, triton.next_power_of_2(num_words)), 1)
    return PackedRowShape(4, min(512, triton.next_power_of_2(num_words)), 4)


def tile_shape(num_rows: int, num_outputs: int, num_words: int) -> PackedTileShape:
    """As ``row_shape``."""
    block_t = max(16, min(64, triton.next_power_of_2(num_rows)))
    splits = max(1, min(8, 264 * 64 // max(num_outputs, 1), num_words // 128))
    return PackedTileShape(block_t, 64, 4, 4, 1 << (splits.bit_length() - 1))
