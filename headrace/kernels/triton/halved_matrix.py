"""HalvedMatrix: an AffineMatrix as the Triton kernels read it: 4 or 8 bits, a scale and perhaps a minimum a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.affine_matrix import AffineMatrix, GroupScales

CHUNK_BYTES = 64
"""Codes of 4 bits: byte j of a chunk holds column j in its low half, column 64 + j in its high half."""

_MAX_SEGMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class HalvedMatrix:
    """Attributes:
    bits: 4 or 8; codes of 5 and 6 bits are kept in 8.
    group_columns: columns that share a scale.
    codes: [n, whole chunks] uint8, or int8 for 8 bits, whose codes are signed.
    scales, minimums: [n, G] fp16 where they are close enough, else fp32; minimums may be None.
    """

    num_rows: int
    num_columns: int
    bits: int
    group_columns: int
    codes: Tensor
    scales: Tensor
    minimums: Tensor | None

    @property
    def segment(self) -> int:
        """Neighbouring bytes of a chunk whose columns share a scale."""
        return min(self.group_columns, _MAX_SEGMENT)

    @property
    def num_bytes(self) -> int:
        """Of codes and scales."""
        minimums = 0 if self.minimums is None else self.minimums.nbytes
        return self.codes.nbytes + self.scales.nbytes + minimums

    @classmethod
    def pack(cls, matrix: AffineMatrix) -> HalvedMatrix:
        """Packs a matrix where it lies. Groups are of 16, 32, 64, multiples of 64, or all columns."""
        group = matrix.group_columns
        if group >= matrix.num_columns:
            group = -(-matrix.num_columns // _MAX_SEGMENT) * _MAX_SEGMENT
        assert group in (16, 32) or group % _MAX_SEGMENT == 0, f"groups of {group} columns"
        scales = _narrow(matrix.scales)
        minimums = None if matrix.minimums is None else _narrow(matrix.minimums)
        if matrix.bits == 4:
            codes = F.pad(matrix.codes, (0, -matrix.num_columns % (2 * CHUNK_BYTES)))
            halves = codes.view(len(codes), -1, 2, CHUNK_BYTES)
            codes = (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)
        else:
            shifted = matrix.codes.to(torch.int16) - matrix.code_offset
            codes = F.pad(shifted.to(torch.int8), (0, -matrix.num_columns % CHUNK_BYTES))
        shape = (matrix.num_rows, matrix.num_columns)
        return cls(*shape, 4 if matrix.bits == 4 else 8, group, codes, scales, minimums)


def _narrow(scales: GroupScales) -> Tensor:
    """fp16 where that loses no more than a rounding to 11 bits; the products with activations round coarser."""
    wide = scales.widen()
    narrow, magnitude = wide.half(), wide.abs()
    is_close = (narrow.float() - wide).abs() <= 2.0**-11 * (magnitude + magnitude.mean())
    return (narrow if bool(is_close.all()) else wide).contiguous()
