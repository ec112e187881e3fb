"""linear_packed and embedding_packed in plain torch: what they compute, not how fast it can be done."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.affine_matrix import BLOCK_COLUMNS, AffineMatrix
from headrace.kernels.reference.embedding import embedding

_ROWS_AT_ONCE = 2048

SECOND_DIGIT = 254
"""Units of the second digit in one of the first."""


def linear_packed(
    x: Tensor,
    matrix: AffineMatrix,
    bias: Tensor | None,
    out: Tensor,
    col: int = 0,
    input_bits: int = 32,
) -> None:
    """out[:, col : col + n] = x @ weights.T + bias, in fp32.

    Args:
        x: [T, in].
        matrix: what ``pack_matrix`` of the same kind of kernels made.
        bias: [n] fp32 or None.
        out: [T, at least col + n]; x's dtype or fp32.
        input_bits: 8 or 16: x is first rounded to so many, with a scale for each 32 columns (``round_inputs``), and
            kernels may multiply integers; 32: it is not.
    """
    wide = x.float() if input_bits == 32 else round_inputs(x, input_bits)
    for start in range(0, matrix.num_rows, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, matrix.num_rows)
        part = F.linear(
            wide, matrix.rows(start, stop).dequantize(), None if bias is None else bias[start:stop]
        )
        out[:, col + start : col + stop].copy_(part)


def round_inputs(x: Tensor, bits: int = 8) -> Tensor:
    """x [T, in] rounded to multiples of 1/127 (8 bits) or 1/32258 (16) of the largest of each 32 columns, as fp32.

    The 16 bits are two digits of 8, the second one in 254ths of the first, so that kernels for 8 bits do for both.
    """
    num_columns = x.shape[1]
    padded = F.pad(x.float(), (0, -num_columns % BLOCK_COLUMNS)).unflatten(1, (-1, BLOCK_COLUMNS))
    largest = padded.abs().amax(-1, keepdim=True)
    # of two tensors: a number over a tensor would be its reciprocal times the number, rounded twice
    inverse = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)
    codes = (padded * inverse).round_()
    scale = largest / 127.0
    if bits == 16:
        codes = codes * SECOND_DIGIT + ((padded * inverse - codes) * SECOND_DIGIT).round_()
        scale = scale / SECOND_DIGIT
    rounded = codes.mul_(scale)
    return rounded.flatten(1)[:, :num_columns]


def embedding_packed(
    ids: Tensor, matrix: AffineMatrix, out: Tensor, scale: float = 1.0, first_row: int | None = None
) -> None:
    """``embedding`` from a packed table; rows are rounded to the dtype of ``out`` before they are scaled.

    Args:
        ids, out, scale, first_row: as ``embedding`` takes them.
        matrix: what ``pack_matrix`` made.
    """
    first = first_row or 0
    is_inside = (ids >= first) & (ids < first + matrix.num_rows)
    rows = matrix.take_rows((ids - first)[is_inside]).dequantize().to(out.dtype)
    found = torch.zeros_like(out)
    found[is_inside] = rows
    embedding(torch.arange(len(ids), device=ids.device), found, out, scale)


def pack_matrix(matrix: AffineMatrix) -> AffineMatrix:
    """A matrix, on the device, in the form that ``linear_packed`` and ``embedding_packed`` take. Each kind of kernels
    has a form of its own; here it is the matrix itself."""
    return matrix
