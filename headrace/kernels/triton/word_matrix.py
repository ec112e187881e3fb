"""WordMatrix: an AffineMatrix as the Triton kernels read it: 4 or 8 bits, a scale and perhaps a minimum a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.affine_matrix import AffineMatrix, GroupScales

CHUNK_WORDS = 16
"""Words of 32 bits in a chunk: code j of word w is that of the chunk's column 16 j + w. So the 16 codes at one place of
a chunk's words are neighbouring columns, of one group, and make a step of the matrix units."""

ROW_MULTIPLE = 128
"""Scales are there for so many rows, so that tiles of up to as many load them unmasked."""

ALIGNMENT = 512
"""Bytes of whose multiples words, scales and minimums begin."""

_MAX_SPAN = 64


@dataclass(frozen=True, slots=True, eq=False)
class WordMatrix:
    """Attributes:
    bits: 4 or 8; codes of 5 and 6 bits are kept in 8, as are those of 4 whose groups are of 16 columns.
    group_columns: columns that share a scale.
    codes: [n, whole chunks] int32: words of eight codes, or of four signed ones of 8 bits.
    scales, minimums: [G, n padded to a multiple of 128] fp16 where they are close enough, else fp32; minimums may be
        None. Threads that hold a few rows load their scales at once.
    """

    num_rows: int
    num_columns: int
    bits: int
    group_columns: int
    codes: Tensor
    scales: Tensor
    minimums: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.num_columns

    @property
    def form(self) -> tuple[int, int, int, int, torch.dtype, bool]:
        """Of matrices with the same, the same kernel multiplies."""
        return *self.shape, self.bits, self.group_columns, self.scales.dtype, self.minimums is None

    @property
    def scales_after(self) -> int:
        """Bytes from the first word to the first scale."""
        return _aligned(self.codes.nbytes)

    @property
    def minimums_after(self) -> int:
        """Bytes from the first word to the first minimum."""
        return self.scales_after + _aligned(self.scales.nbytes)

    @property
    def is_in_one_piece(self) -> bool:
        """Whether scales and minimums lie there, as ``pack`` leaves them."""
        return _bytes_between(self.codes, self.scales) == self.scales_after and (
            self.minimums is None or _bytes_between(self.codes, self.minimums) == self.minimums_after
        )

    @property
    def num_bytes(self) -> int:
        """Of codes and scales."""
        minimums = 0 if self.minimums is None else self.minimums.nbytes
        return self.codes.nbytes + self.scales.nbytes + minimums

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int],
        bits: int,
        group_columns: int,
        has_minimums: bool,
        scale_dtype: torch.dtype,
        device: torch.device,
    ) -> WordMatrix:
        """For codes of so many bits and groups of 16, 32, 64, multiples of 64, or all columns, in one piece of memory:
        where scales are then follows from where words are."""
        num_rows, num_columns = shape
        if group_columns >= num_columns:
            group_columns = -(-num_columns // _MAX_SPAN) * _MAX_SPAN
        assert group_columns in (16, 32) or group_columns % _MAX_SPAN == 0, (
            f"groups of {group_columns} columns"
        )
        bits = 4 if bits == 4 and group_columns != 16 else 8
        chunks = -(-num_columns // (CHUNK_WORDS * (32 // bits)))
        groups = -(-num_columns // group_columns)
        sizes = (groups, -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE)
        num_words, num_scales = num_rows * chunks * CHUNK_WORDS, sizes[0] * sizes[1]
        starts = [0, _aligned(4 * num_words)]
        starts += [starts[1] + _aligned(num_scales * scale_dtype.itemsize)] * has_minimums
        memory = torch.empty(starts[-1] + num_scales * scale_dtype.itemsize, dtype=torch.uint8, device=device)
        words = memory[: 4 * num_words].view(torch.int32).view(num_rows, -1)
        scales = [
            memory[start : start + num_scales * scale_dtype.itemsize].view(scale_dtype).view(sizes)
            for start in starts[1:]
        ]
        return cls(*shape, bits, group_columns, words, scales[0], scales[1] if has_minimums else None)

    @classmethod
    def pack(cls, matrix: AffineMatrix) -> WordMatrix:
        """Packs a matrix where it lies."""
        scales = _by_group(matrix.scales)
        minimums = None if matrix.minimums is None else _by_group(matrix.minimums)
        if minimums is not None and minimums.dtype != scales.dtype:
            scales, minimums = scales.float(), minimums.float()
        shape, device = (matrix.num_rows, matrix.num_columns), matrix.codes.device
        made = cls.empty(shape, matrix.bits, matrix.group_columns, minimums is not None, scales.dtype, device)
        codes = matrix.codes if made.bits == 4 else matrix.codes.to(torch.int16) - matrix.code_offset
        made.codes.copy_(_words(codes, made.bits))
        made.scales.copy_(scales)
        if made.minimums is not None and minimums is not None:
            made.minimums.copy_(minimums)
        return made


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _bytes_between(one: Tensor, other: Tensor) -> int | None:
    """From one tensor's beginning to another's in the same memory."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return None
    return int(other.storage_offset() * other.element_size() - one.storage_offset() * one.element_size())


def _words(codes: Tensor, bits: int) -> Tensor:
    """codes [n, in] of any integers -> [n, words] int32."""
    places = 32 // bits
    padded = F.pad(codes.to(torch.uint8), (0, -codes.shape[1] % (CHUNK_WORDS * places)))
    planes = padded.view(len(codes), -1, places, CHUNK_WORDS).transpose(2, 3)
    if bits == 4:
        planes = planes[..., 0::2] | (planes[..., 1::2] << 4)
    return planes.contiguous().view(torch.int32).flatten(1)


def _by_group(scales: GroupScales) -> Tensor:
    """[G, n]: fp16 where that loses no more than a rounding to 11 bits; the products with activations round coarser."""
    wide = scales.widen()
    narrow, magnitude = wide.half(), wide.abs()
    is_close = (narrow.float() - wide).abs() <= 2.0**-11 * (magnitude + magnitude.mean())
    chosen = narrow if bool(is_close.all()) else wide
    return F.pad(chosen.T, (0, -len(chosen) % ROW_MULTIPLE)).contiguous()
