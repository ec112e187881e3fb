"""linear_packed and embedding_packed over matrices of 4 or 8 bits: see ``WordMatrix``."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from headrace.kernels.affine_matrix import AffineMatrix
from headrace.kernels.reference.linear_packed import round_inputs
from headrace.kernels.triton.launch import has_wgmma, launch_options
from headrace.kernels.triton.linear import cublas
from headrace.kernels.triton.linear_packed_kernels import (
    decode_rows_kernel,
    packed_row_kernel,
    packed_sums_kernel,
    packed_tile_kernel,
)
from headrace.kernels.triton.packed_config import PackedConfig
from headrace.kernels.triton.packed_pair_kernel import packed_pair_kernel
from headrace.kernels.triton.packed_shapes import (
    MAX_WGMMA_ROWS,
    DecodedShape,
    PackedPairShape,
    PackedRowShape,
    PackedTileShape,
    PackedWgmmaShape,
    pair_shape,
    row_shape,
    tile_shape,
    wgmma_shape,
)
from headrace.kernels.triton.packed_wgmma_kernel import packed_wgmma_kernel
from headrace.kernels.triton.word_matrix import CHUNK_WORDS, WordMatrix

MAX_TILED_ROWS = 256
"""Beyond it the matrix is decoded once, piece by piece, and multiplied by cuBLAS."""

MAX_FP32_ROWS = 32
"""The same where the matrix units do not multiply: large tiles do not fit registers."""

_DECODED = DecodedShape(64 << 20)
_SUMS_PER_PROGRAM = 1024
_PREFETCH_BYTES = 256
_NUMBERS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

TileShape = PackedTileShape | PackedWgmmaShape | PackedPairShape
Shape = PackedRowShape | TileShape | DecodedShape


def linear_packed(
    x: Tensor,
    matrix: WordMatrix,
    bias: Tensor | None,
    out: Tensor,
    col: int = 0,
    input_bits: int = 32,
    *,
    shape: Shape | None = None,
) -> None:
    """See ``headrace.kernels.reference.linear_packed.linear_packed``. Several rows are multiplied with weights rounded
    to the type of x, as their scales are, and scales of two levels with their product in fp16."""
    if x.shape[0] == 0:
        return
    if input_bits != 32:
        x = round_inputs(x, input_bits).to(x.dtype)
    shape = shape or packed_shape(x.shape[0], matrix, x.dtype, _is_aligned(x))
    if isinstance(shape, PackedRowShape):
        _one_row(x, matrix, bias, out, col, shape)
    elif isinstance(shape, TileShape):
        _tiles(x, matrix, bias, out, col, shape)
    else:
        _decoded(x, matrix, bias, out, col, shape)


def packed_shape(num_rows: int, matrix: WordMatrix, dtype: torch.dtype, is_aligned: bool = True) -> Shape:
    """How a product with inputs of that type is made; is_aligned: whether their rows begin at multiples of 16 bytes."""
    num_words = matrix.codes.shape[1]
    if num_rows == 1:
        return row_shape(num_words, matrix.bits, matrix.group_columns)
    is_half = dtype in (torch.bfloat16, torch.float16)
    if is_half and is_aligned and has_wgmma() and num_rows <= MAX_TILED_ROWS:
        choose = wgmma_shape if num_rows <= MAX_WGMMA_ROWS else pair_shape
        return choose(num_rows, matrix.num_rows, num_words, *chunk_sizes(matrix))
    if num_rows <= (MAX_FP32_ROWS if dtype == torch.float32 else MAX_TILED_ROWS):
        return tile_shape(num_rows, matrix.num_rows, num_words)
    return _DECODED


def chunk_sizes(matrix: WordMatrix) -> tuple[int, int]:
    """Columns of a chunk, bytes of an output's scales and minimums of a chunk."""
    config = _config(matrix, None, 1, 1, CHUNK_WORDS)
    each = matrix.scales.element_size() * (2 if config.has_minimums else 1)
    return config.chunk, config.num_spans * each


def _is_aligned(x: Tensor) -> bool:
    """Whether rows of x can be copied 16 bytes at a time; Triton sees multiples of 16 elements."""
    return x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0 and x.data_ptr() % 16 == 0


def embedding_packed(
    ids: Tensor, matrix: WordMatrix, out: Tensor, scale: float = 1.0, first_row: int | None = None
) -> None:
    """See ``headrace.kernels.reference.linear_packed.embedding_packed``."""
    if len(ids):
        factor = torch.tensor(scale, dtype=out.dtype, device="cpu").item()
        _decode(ids, matrix, out, first_row or 0, factor)


def pack_matrix(matrix: AffineMatrix) -> WordMatrix:
    """The matrix with 4 or 8 bits a weight."""
    return WordMatrix.pack(matrix)


def _one_row(
    x: Tensor, matrix: WordMatrix, bias: Tensor | None, out: Tensor, col: int, shape: PackedRowShape
) -> None:
    config = _config(matrix, bias, 1, shape.block_n, shape.block_w)
    packed_row_kernel[(triton.cdiv(matrix.num_rows, shape.block_n),)](
        x,
        *_tensors(matrix, bias),
        out,
        matrix.num_rows,
        matrix.scales.stride(0),
        col,
        C=config,
        num_warps=shape.num_warps,
        **launch_options(),
    )


def _tiles(
    x: Tensor,
    matrix: WordMatrix,
    bias: Tensor | None,
    out: Tensor,
    col: int,
    shape: TileShape,
) -> None:
    num_rows, splits = x.shape[0], shape.num_splits
    config = _config(matrix, bias, shape.block_t, shape.block_n, CHUNK_WORDS, splits)
    target = out
    if splits > 1:
        sizes = (splits, num_rows, matrix.num_rows)
        target = torch.empty(sizes, dtype=torch.float32, device=x.device)
    kernel, grid, special = _tile_launch(num_rows, matrix.num_rows, shape, config)
    kernel[grid](
        x,
        *_tensors(matrix, bias),
        target,
        num_rows,
        matrix.num_rows,
        matrix.scales.stride(0),
        col,
        x.stride(0),
        out.stride(0),
        NUMBER=_NUMBERS[x.dtype],
        NUM_STAGES=shape.num_stages,
        C=config,
        **special,
        **launch_options(),
    )
    if splits > 1:
        _add_up(target, bias, out, col, config)


def _tile_launch(
    num_rows: int, num_outputs: int, shape: TileShape, config: PackedConfig
) -> tuple[Any, tuple[int, int, int], dict[str, int]]:
    """(kernel, grid, its own arguments)."""
    tiles, blocks = triton.cdiv(num_rows, shape.block_t), triton.cdiv(num_outputs, shape.block_n)
    if isinstance(shape, PackedPairShape):
        grid = (tiles * blocks * shape.num_splits, 1, 1)
        return packed_pair_kernel, grid, {"num_warps": 4}
    if isinstance(shape, PackedWgmmaShape):
        assert tiles == 1, f"{num_rows} rows in tiles of {shape.block_t}"
        return packed_wgmma_kernel, (1, blocks, shape.num_splits), {"num_warps": shape.num_warps}
    is_prefetched = launch_options()["PDL"] and config.num_words % config.words_each == 0
    ahead = min(_PREFETCH_BYTES, 4 * config.words_each) if is_prefetched else 0
    special = {"PREFETCH_BYTES": ahead, "num_stages": 1, "num_warps": shape.num_warps}
    return packed_tile_kernel, (blocks, tiles, shape.num_splits), special


def _add_up(sums: Tensor, bias: Tensor | None, out: Tensor, col: int, config: PackedConfig) -> None:
    """The splits' sums [splits, T, n] in ``out``."""
    _, num_rows, num_outputs = sums.shape
    packed_sums_kernel[(triton.cdiv(num_outputs, _SUMS_PER_PROGRAM), num_rows)](
        sums,
        sums if bias is None else bias,
        out,
        num_rows,
        num_outputs,
        col,
        out.stride(0),
        BLOCK=_SUMS_PER_PROGRAM,
        C=config,
        num_warps=4,
        **launch_options(),
    )


def _decoded(
    x: Tensor, matrix: WordMatrix, bias: Tensor | None, out: Tensor, col: int, shape: DecodedShape
) -> None:
    rows_each = max(1, shape.num_bytes // (matrix.num_columns * x.element_size()))
    for start in range(0, matrix.num_rows, rows_each):
        count = min(rows_each, matrix.num_rows - start)
        weights = torch.empty((count, matrix.num_columns), dtype=x.dtype, device=x.device)
        _decode(None, matrix, weights, start, 1.0)
        cublas(x, weights, None, out, col + start)
    if bias is not None:
        out[:, col : col + matrix.num_rows].add_(bias)


def _decode(ids: Tensor | None, matrix: WordMatrix, out: Tensor, first_row: int, scale: float) -> None:
    config = _config(matrix, None, 1, 1 if ids is not None else 16, 64)
    decode_rows_kernel[
        (triton.cdiv(len(out), config.block_n), triton.cdiv(config.num_words, config.block_w))
    ](
        matrix.codes if ids is None else ids,
        *_tensors(matrix, None)[:3],
        out,
        len(out),
        matrix.num_rows,
        matrix.scales.stride(0),
        out.stride(0),
        first_row,
        scale,
        HAS_IDS=ids is not None,
        C=config,
        num_warps=1 if ids is not None else 4,
        **launch_options(),
    )


def _tensors(matrix: WordMatrix, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    minimums = matrix.scales if matrix.minimums is None else matrix.minimums
    return matrix.codes, matrix.scales, minimums, matrix.scales if bias is None else bias


def _config(
    matrix: WordMatrix, bias: Tensor | None, block_t: int, block_n: int, block_w: int, num_splits: int = 1
) -> PackedConfig:
    return PackedConfig(
        matrix.num_columns,
        matrix.bits,
        matrix.group_columns,
        block_t,
        block_n,
        block_w,
        has_minimums=matrix.minimums is not None,
        has_bias=bias is not None,
        num_splits=num_splits,
    )
