"""AWQ checkpoints (Lin et al. 2023), in AutoAWQ's "gemm" layout.

With k an input, r an output, g = k / group:  w[r][k] = scales[g][r] * (qweight[k][r] - qzeros[g][r]); eight outputs
share a word, in the order that its kernels like.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError, UnsupportedModelError
from headrace.kernels.affine_matrix import AffineMatrix
from headrace.quant.base import Shard, WeightHome
from headrace.quant.packed import PackedMethod
from headrace.quant.words import affine_from_zero_points, check_config, unpack_words

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The field of a word that holds each of its eight outputs."""

_BITS, _PER_WORD = 4, 8


@dataclass(frozen=True, slots=True)
class AWQMethod(PackedMethod):
    """Attributes:
    group_columns: None: one group for all columns.
    """

    group_columns: int | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AWQMethod:
        """Raises UnsupportedModelError for other bits and layouts."""
        bits = config.get("bits", config.get("w_bit"))
        version = str(config.get("version", "gemm")).lower()
        wrong = check_config(
            {"bits": (_BITS,), "version": ("gemm",)}, {"bits": bits, "version": version}, "awq"
        )
        if wrong:
            raise UnsupportedModelError(wrong)
        group = int(config.get("group_size", config.get("q_group_size", -1)))
        return cls(None if group <= 0 else group)

    @property
    def form(self) -> str:
        return "AWQ int4"

    @property
    def marker(self) -> str:
        """The tensor that a quantized module has."""
        return "qweight"

    def read(self, shard: Shard, home: WeightHome) -> AffineMatrix:
        num_rows, num_columns = shard.shape
        if self.group_columns is not None:
            shard.check_groups(self.group_columns)
        if shard.rows.start % _PER_WORD or shard.rows.stop % _PER_WORD:
            raise ConfigError(
                f"tensor_parallel_size {num_rows // shard.num_rows} cuts the {num_rows} rows of '{shard.name}' inside "
                f"a word of {_PER_WORD}; choose a size that divides {num_rows // _PER_WORD}"
            )
        group = self.group_columns or num_columns
        groups = slice(shard.columns.start // group, -(-shard.columns.stop // group))
        words = slice(shard.rows.start // _PER_WORD, shard.rows.stop // _PER_WORD)
        num_groups, num_words = -(-num_columns // group), num_rows // _PER_WORD
        codes = self._unpack(f"{shard.name}.qweight", (shard.columns, words), (num_columns, num_words), home)
        zeros = self._unpack(f"{shard.name}.qzeros", (groups, words), (num_groups, num_words), home)
        scales = home.weights.get(f"{shard.name}.scales", (groups, shard.rows), shape=(num_groups, num_rows))
        wide = scales.dequantize(torch.float32).t().contiguous()
        columns_each = min(group, codes.shape[1])
        return affine_from_zero_points(codes, _BITS, columns_each, wide, zeros.int())

    @staticmethod
    def _unpack(name: str, index: tuple[slice, slice], shape: tuple[int, int], home: WeightHome) -> Tensor:
        """[outputs, inputs or groups] uint8."""
        stored = home.weights.get(name, index, shape=shape)
        if stored.tensor is None or stored.tensor.dtype != torch.int32:
            raise UnsupportedModelError(f"{stored.where}: tensor '{name}' should hold 32-bit integers")
        return unpack_words(stored.tensor, _BITS, _ORDER).t().contiguous()
