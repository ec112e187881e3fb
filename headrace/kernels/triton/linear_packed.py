"""linear_packed and embedding_packed over matrices of 4 or 8 bits: see ``HalvedMatrix``."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from headrace.kernels.affine_matrix import AffineMatrix
from headrace.kernels.reference.linear_packed import round_inputs
from headrace.kernels.triton.halved_matrix import CHUNK_BYTES, HalvedMatrix
from headrace.kernels.triton.launch import launch_options
from headrace.kernels.triton.linear import cublas
from headrace.kernels.triton.linear_packed_kernels import (
    PackedConfig,
    decode_rows_kernel,
    packed_row_kernel,
    packed_tile_kernel,
)

MAX_TILED_ROWS = 32
"""Beyond it the matrix is decoded once, piece by piece, and multiplied by cuBLAS: at 64 rows the tiles of a step of
llama-3-8b take 24 ms (int4-g32, one H200), where bf16 weights are multiplied in 4.2."""

_DECODED_BYTES = 64 << 20
_ROW_BYTES_AT_ONCE = 256


def linear_packed(
    x: Tensor,
    matrix: HalvedMatrix,
    bias: Tensor | None,
    out: Tensor,
    col: int = 0,
    input_bits: int = 32,
) -> None:
    """See ``headrace.kernels.reference.linear_packed.linear_packed``. Several rows are multiplied with weights rounded
    to the type of x, and scales of two levels with their product in fp16."""
    if x.shape[0] == 0:
        return
    if input_bits != 32:
        x = round_inputs(x, input_bits).to(x.dtype)
    if x.shape[0] == 1:
        _one_row(x, matrix, bias, out, col)
    elif x.shape[0] <= MAX_TILED_ROWS:
        _tiles(x, matrix, bias, out, col)
    else:
        _decoded(x, matrix, bias, out, col)


def embedding_packed(
    ids: Tensor, matrix: HalvedMatrix, out: Tensor, scale: float = 1.0, first_row: int | None = None
) -> None:
    """See ``headrace.kernels.reference.linear_packed.embedding_packed``."""
    if len(ids):
        factor = torch.tensor(scale, dtype=out.dtype).item()
        _decode(ids, matrix, out, first_row or 0, factor)


def pack_matrix(matrix: AffineMatrix) -> HalvedMatrix:
    """The matrix with 4 or 8 bits a weight."""
    return HalvedMatrix.pack(matrix)


def _one_row(x: Tensor, matrix: HalvedMatrix, bias: Tensor | None, out: Tensor, col: int) -> None:
    block_b = min(_ROW_BYTES_AT_ONCE, triton.next_power_of_2(matrix.codes.shape[1]))
    config = _config(matrix, bias, 1, 8 if matrix.num_rows >= 16384 else 4, block_b)
    packed_row_kernel[(triton.cdiv(matrix.num_rows, config.block_n),)](
        x,
        *_tensors(matrix, bias),
        out,
        matrix.num_rows,
        matrix.scales.shape[1],
        col,
        C=config,
        num_warps=4,
        **launch_options(),
    )


def _tiles(x: Tensor, matrix: HalvedMatrix, bias: Tensor | None, out: Tensor, col: int) -> None:
    num_rows = x.shape[0]
    block_t = min(64, max(16, triton.next_power_of_2(num_rows)))
    block_n = 32 if block_t == 16 else 64 if block_t == 32 else 128
    config = _config(matrix, bias, block_t, block_n, CHUNK_BYTES)
    packed_tile_kernel[(triton.cdiv(matrix.num_rows, block_n), triton.cdiv(num_rows, block_t))](
        x,
        *_tensors(matrix, bias),
        out,
        num_rows,
        matrix.num_rows,
        matrix.scales.shape[1],
        col,
        x.stride(0),
        out.stride(0),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        C=config,
        num_warps=4 if block_t < 64 else 8,
        num_stages=4,
        **launch_options(),
    )


def _decoded(x: Tensor, matrix: HalvedMatrix, bias: Tensor | None, out: Tensor, col: int) -> None:
    rows_each = max(1, _DECODED_BYTES // (matrix.num_columns * x.element_size()))
    for start in range(0, matrix.num_rows, rows_each):
        count = min(rows_each, matrix.num_rows - start)
        weights = torch.empty((count, matrix.num_columns), dtype=x.dtype, device=x.device)
        _decode(None, matrix, weights, start, 1.0)
        cublas(x, weights, None, out, col + start)
    if bias is not None:
        out[:, col : col + matrix.num_rows].add_(bias)


def _decode(ids: Tensor | None, matrix: HalvedMatrix, out: Tensor, first_row: int, scale: float) -> None:
    config = _config(matrix, None, 1, 1, CHUNK_BYTES)
    decode_rows_kernel[(len(out), matrix.codes.shape[1] // CHUNK_BYTES)](
        matrix.codes if ids is None else ids,
        *_tensors(matrix, None)[:3],
        out,
        matrix.num_rows,
        matrix.scales.shape[1],
        out.stride(0),
        first_row,
        scale,
        HAS_IDS=ids is not None,
        C=config,
        num_warps=1,
        **launch_options(),
    )


def _tensors(matrix: HalvedMatrix, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    minimums = matrix.scales if matrix.minimums is None else matrix.minimums
    return matrix.codes, matrix.scales, minimums, matrix.scales if bias is None else bias


def _config(
    matrix: HalvedMatrix, bias: Tensor | None, block_t: int, block_n: int, block_b: int
) -> PackedConfig:
    return PackedConfig(
        matrix.num_columns,
        matrix.bits,
        matrix.group_columns,
        matrix.segment,
        block_t,
        block_n,
        block_b,
        has_minimums=matrix.minimums is not None,
        has_bias=bias is not None,
    )
