"""Tiles of the kernels of packed weights, and which of them a product takes."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from headrace.kernels.triton.word_matrix import CHUNK_WORDS

MAX_WGMMA_ROWS = 64
"""Of x, for ``packed_wgmma_kernel``; on Hopper more rows are for ``packed_pair_kernel``."""

_MIN_CHUNKS = 6
_LARGE_TILE = 256 * 128
_LONG_PROGRAM = 2560
"""Columns that large tiles bring each multiprocessor: of those measured 1,740 were too few, 3,470 enough."""

_MULTIPROCESSORS = 132
_SHARED_BYTES, _RESERVED_BYTES = 228 << 10, 2 << 10
"""Of a multiprocessor of Hopper's, and what each of its programs loses, barriers included."""


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
class PackedWgmmaShape(PackedTileShape):
    """Tile of the kernel of several rows for Hopper."""


@dataclass(frozen=True, slots=True)
class PackedPairShape:
    """Tile of the kernel of many rows for Hopper; numbers as of ``PackedTileShape``."""

    block_t: int
    block_n: int
    num_stages: int
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
    """Up to 128 rows in one tile, so that weights are decoded once, and programs to fill the device. On Hopper only
    fp32 and rows that cannot be copied 16 bytes at a time come here."""
    block_t = max(16, min(triton.next_power_of_2(num_rows), 128))
    block_n, warps = (64, 4) if block_t <= 32 else (128, 8)
    programs = triton.cdiv(num_outputs, block_n) * triton.cdiv(num_rows, block_t)
    splits = max(1, min(8, 2 * _MULTIPROCESSORS // programs, num_words // 128))
    return PackedTileShape(block_t, block_n, 4, warps, splits)


def wgmma_shape(
    num_rows: int, num_outputs: int, num_words: int, chunk: int, scale_bytes: int
) -> PackedWgmmaShape:
    """Of ``MAX_WGMMA_ROWS`` at most, as measured on an H200 (``bench_quant.py --variants``): wide tiles where they fill
    the device, for each reads all of x; else splits, but only as many as are there at the same time.

    chunk: columns of one.  scale_bytes: of an output's scales and minimums of a chunk.
    """
    block_t = max(16, triton.next_power_of_2(num_rows))
    if block_t <= 32:
        is_wide = num_outputs >= 128 * _MULTIPROCESSORS
        block_n, warps, resident = (128, 8, 2) if is_wide else (64, 4, 4)
    else:
        block_n, warps, resident = 128, 4, 2
    splits = wgmma_splits(triton.cdiv(num_outputs, block_n), num_words, resident)
    stages = wgmma_stages(block_t, block_n, chunk, scale_bytes, resident)
    return PackedWgmmaShape(block_t, block_n, stages, warps, splits)


def pair_shape(
    num_rows: int, num_outputs: int, num_words: int, chunk: int, scale_bytes: int
) -> PackedPairShape:
    """Of more rows, as measured there: large tiles where they are work enough for all multiprocessors; else half as
    large ones, which need fewer splits. Arguments as of ``wgmma_shape``."""
    block_t = 128 if num_rows <= 128 else 256
    block_n = _LARGE_TILE // block_t
    tiles = triton.cdiv(num_outputs, block_n) * triton.cdiv(num_rows, block_t)
    is_large = tiles * (num_words // CHUNK_WORDS * chunk) >= _LONG_PROGRAM * _MULTIPROCESSORS
    if not is_large:
        block_t, block_n = 128, 128
        tiles = triton.cdiv(num_outputs, block_n) * triton.cdiv(num_rows, block_t)
    stages = wgmma_stages(block_t, block_n, chunk, scale_bytes, 1)
    return PackedPairShape(block_t, block_n, stages, wgmma_splits(tiles, num_words, 1))


def wgmma_splits(tiles: int, num_words: int, resident: int) -> int:
    """As many as are there at the same time, ``resident`` programs a multiprocessor; of six chunks at least."""
    most = min(8, num_words // (CHUNK_WORDS * _MIN_CHUNKS))
    return max(1, min(most, resident * _MULTIPROCESSORS // tiles))


def wgmma_stages(block_t: int, block_n: int, chunk: int, scale_bytes: int, resident: int) -> int:
    """As many as let ``resident`` programs share a multiprocessor, eight at most."""
    stage_bytes = block_n * (4 * CHUNK_WORDS + scale_bytes) + block_t * chunk * 2
    return max(2, min(8, (_SHARED_BYTES // resident - _RESERVED_BYTES) // stage_bytes))
