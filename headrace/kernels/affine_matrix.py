"""AffineMatrix: a matrix of small integers with a scale, and perhaps a minimum, for each group of columns.

Every quantized format here is read into this form; each kind of kernels packs it as its ``linear_packed`` likes it
(``pack_matrix``). With c a code and s, m the scale and minimum of its row and group, a weight is

    s * c + m                      with minimums
    s * c                          8 bits without: codes are signed
    s * (c - 2^(bits - 1))         fewer bits without
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_COLUMNS = 32
"""Columns that share a scale of 8-bit inputs."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupScales:
    """A number for each row and group of columns.

    Attributes:
        values: [n, G] fp16 or fp32; int8 when ``supers`` multiply them.
        supers: [n, columns / 256] fp16, or None.
    """

    values: Tensor
    supers: Tensor | None = None

    def widen(self) -> Tensor:
        """The numbers, [n, G] fp32."""
        if self.supers is None:
            return self.values.float()
        repeats = self.values.shape[1] // self.supers.shape[1]
        return self.values.float() * self.supers.float().repeat_interleave(repeats, dim=1)

    def tensors(self) -> list[Tensor]:
        """What is stored."""
        return [self.values] if self.supers is None else [self.values, self.supers]

    @staticmethod
    def stack(parts: Sequence[GroupScales]) -> GroupScales:
        """Rows below each other; types that differ become fp32."""
        if len({part.values.dtype for part in parts}) > 1:
            return GroupScales(torch.cat([part.widen() for part in parts]))
        supers = [part.supers for part in parts if part.supers is not None]
        return GroupScales(torch.cat([part.values for part in parts]), torch.cat(supers) if supers else None)


@dataclass(frozen=True, slots=True, eq=False)
class AffineMatrix:
    """See the module.

    Attributes:
        codes: [n, in]; uint8, below 2^bits, or int8 for 8 bits.
        bits: 4, 5, 6 or 8.
        group_columns: columns that share a scale; the last group may have fewer.
        scales, minimums: [n, G]; minimums may be None.
    """

    codes: Tensor
    bits: int
    group_columns: int
    scales: GroupScales
    minimums: GroupScales | None = None

    @property
    def num_rows(self) -> int:
        """Outputs."""
        return self.codes.shape[0]

    @property
    def num_columns(self) -> int:
        """Inputs."""
        return self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        """Of codes and scales."""
        minimums = [] if self.minimums is None else self.minimums.tensors()
        return sum(tensor.nbytes for tensor in (self.codes, *self.scales.tensors(), *minimums))

    @property
    def code_offset(self) -> int:
        """What is subtracted from codes."""
        return 0 if self.bits == 8 or self.minimums is not None else 1 << (self.bits - 1)

    def rows(self, start: int, stop: int) -> AffineMatrix:
        """Some of the rows."""
        return self._of_rows(slice(start, stop))

    def take_rows(self, index: Tensor) -> AffineMatrix:
        """Rows by number, [r] int64."""
        return self._of_rows(index)

    def dequantize(self) -> Tensor:
        """The weights, [n, in] fp32: the code less its offset, times the scale, plus the minimum, each rounded."""
        weights = self.codes.float()
        if self.code_offset:
            weights.sub_(float(self.code_offset))
        weights.mul_(self._by_column(self.scales))
        if self.minimums is not None:
            weights.add_(self._by_column(self.minimums))
        return weights

    def to(self, device: torch.device | str) -> AffineMatrix:
        """On another device."""
        minimums = None if self.minimums is None else _moved(self.minimums, device)
        codes, scales = self.codes.to(device), _moved(self.scales, device)
        return AffineMatrix(codes, self.bits, self.group_columns, scales, minimums)

    @staticmethod
    def stack(parts: Sequence[AffineMatrix]) -> AffineMatrix:
        """Rows below each other; all with the same bits, groups and columns, and with or without minimums."""
        [bits], [group] = {part.bits for part in parts}, {part.group_columns for part in parts}
        minimums = [part.minimums for part in parts if part.minimums is not None]
        assert len(minimums) in (0, len(parts)), "all with minimums, or none"
        return AffineMatrix(
            torch.cat([part.codes for part in parts]),
            bits,
            group,
            GroupScales.stack([part.scales for part in parts]),
            GroupScales.stack(minimums) if minimums else None,
        )

    def _of_rows(self, index: slice | Tensor) -> AffineMatrix:
        minimums = None if self.minimums is None else _rows_of(self.minimums, index)
        scales = _rows_of(self.scales, index)
        return AffineMatrix(self.codes[index], self.bits, self.group_columns, scales, minimums)

    def _by_column(self, scales: GroupScales) -> Tensor:
        wide = scales.widen().repeat_interleave(self.group_columns, dim=1)
        return wide[:, : self.num_columns]


def _rows_of(scales: GroupScales, index: slice | Tensor) -> GroupScales:
    supers = None if scales.supers is None else scales.supers[index]
    return GroupScales(scales.values[index], supers)


def _moved(scales: GroupScales, device: torch.device | str) -> GroupScales:
    supers = None if scales.supers is None else scales.supers.to(device)
    return GroupScales(scales.values.to(device), supers)
