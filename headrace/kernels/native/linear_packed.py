"""linear_packed and embedding_packed; see kernels/reference/linear_packed.py. With inputs of 8
bits, and with 16 below 64 rows, the result of a row does not depend on the other rows."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from headrace.kernels.affine_matrix import AffineMatrix
from headrace.kernels.native.native_op import native_op
from headrace.kernels.native.run import check_rows
from headrace.kernels.native.structs import DTYPES, EmbeddingPackedArgs, LinearPackedArgs
from headrace.kernels.native.tiled_matrix import TiledMatrix


@native_op(lambda x, matrix, *_, **__: x.shape[0] * matrix.num_rows * matrix.num_columns)
def linear_packed(
    x: Tensor,
    matrix: TiledMatrix,
    bias: Tensor | None,
    out: Tensor,
    col: int = 0,
    input_bits: int = 32,
) -> LinearPackedArgs:
    """See the reference."""
    check_rows(x=x, out=out)
    assert x.shape[1] == matrix.num_columns and col + matrix.num_rows <= out.shape[1]
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous())
    return LinearPackedArgs(
        rows=x.shape[0],
        x=x.data_ptr(),
        matrix=ctypes.addressof(matrix.struct),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr() + col * out.element_size(),
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        num_columns=matrix.num_columns,
        x_dtype=DTYPES[x.dtype],
        out_dtype=DTYPES[out.dtype],
        input_bits=input_bits,
    )


@native_op(lambda ids, matrix, out, *_, **__: out.numel())
def embedding_packed(
    ids: Tensor, matrix: TiledMatrix, out: Tensor, scale: float = 1.0, first_row: int | None = None
) -> EmbeddingPackedArgs:
    """See the reference."""
    check_rows(ids=ids, out=out)
    assert ids.dtype == torch.int64 and out.shape == (len(ids), matrix.num_columns)
    return EmbeddingPackedArgs(
        rows=len(ids),
        ids=ids.data_ptr(),
        matrix=ctypes.addressof(matrix.struct),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        num_columns=matrix.num_columns,
        first_row=first_row or 0,
        scale=torch.tensor(scale, dtype=out.dtype, device="cpu").item(),
        out_dtype=DTYPES[out.dtype],
    )


def pack_matrix(matrix: AffineMatrix) -> TiledMatrix:
    """The matrix in tiles of 8 rows."""
    return TiledMatrix.pack(matrix)
