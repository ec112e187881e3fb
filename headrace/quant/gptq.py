"""GPTQ checkpoints (Frantar et al. 2022), in the layout of AutoGPTQ and GPTQModel.

With k an input, r an output, g = g_idx[k] its group:  w[r][k] = scales[g][r] * (qweight[k][r] - qzeros[g][r] - 1),
where the older of two formats stores zero points less one; "gptq_v2" stores them as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headrace.errors import UnsupportedModelError
from headrace.kernels.affine_matrix import AffineMatrix
from headrace.quant.base import Shard, WeightHome
from headrace.quant.packed import PackedMethod
from headrace.quant.precision import EMBEDDING_ROUNDING
from headrace.quant.rounding import round_weights
from headrace.quant.words import affine_from_zero_points, check_config, unpack_words

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GPTQMethod(PackedMethod):
    """Attributes:
    bits: 4 or 8.
    group_columns: None: one group for all columns.
    zero_offset: what is added to stored zero points.
    """

    bits: int
    group_columns: int | None
    zero_offset: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GPTQMethod:
        """Raises UnsupportedModelError for other bits and formats."""
        found = {"bits": config.get("bits"), "checkpoint_format": config.get("checkpoint_format", "gptq")}
        wrong = check_config({"bits": (4, 8), "checkpoint_format": ("gptq", "gptq_v2")}, found, "gptq")
        if wrong:
            raise UnsupportedModelError(wrong)
        group = int(config.get("group_size", -1))
        is_old = found["checkpoint_format"] == "gptq"
        return cls(int(config["bits"]), None if group <= 0 else group, 1 if is_old else 0)

    @property
    def form(self) -> str:
        return f"GPTQ int{self.bits}"

    @property
    def marker(self) -> str:
        """The tensor that a quantized module has."""
        return "qweight"

    def read(self, shard: Shard, home: WeightHome) -> AffineMatrix:
        group = self.group_columns or shard.shape[1]
        order = self._order(shard, home, group)
        if order is not None:
            return self._reordered(shard, home, order)
        if self.group_columns is not None:
            shard.check_groups(group)
        return self._read_columns(shard, home, shard.columns)

    def _read_columns(self, shard: Shard, home: WeightHome, columns: slice) -> AffineMatrix:
        weights, name = home.weights, shard.name
        num_rows, num_columns = shard.shape
        group = self.group_columns or num_columns
        per_word = 32 // self.bits
        words = slice(columns.start // per_word, -(-columns.stop // per_word))
        groups = slice(columns.start // group, -(-columns.stop // group))
        num_groups = -(-num_columns // group)
        qweight = _integers(
            weights.get(f"{name}.qweight", (words, shard.rows), shape=(num_columns // per_word, num_rows))
        )
        start = columns.start - words.start * per_word
        codes = unpack_words(qweight.t(), self.bits)[:, start : start + columns.stop - columns.start]
        scales = weights.get(f"{name}.scales", (groups, shard.rows), shape=(num_groups, num_rows))
        zero_words = slice(shard.rows.start // per_word, -(-shard.rows.stop // per_word))
        shape = (num_groups, -(-num_rows // per_word))
        qzeros = _integers(weights.get(f"{name}.qzeros", (groups, zero_words), shape=shape))
        first = shard.rows.start - zero_words.start * per_word
        zeros = unpack_words(qzeros, self.bits)[:, first : first + shard.num_rows].t().int()
        # AutoGPTQ lets a zero point of 16 wrap around, which it reads as 0 again
        zeros = (zeros + self.zero_offset) & ((1 << self.bits) - 1)
        columns_each = min(group, codes.shape[1])
        wide = scales.dequantize(torch.float32).t().contiguous()
        return affine_from_zero_points(codes.contiguous(), self.bits, columns_each, wide, zeros)

    def _order(self, shard: Shard, home: WeightHome, group: int) -> Tensor | None:
        """[in] group of each column where groups are not ranges of columns (act-order); else None."""
        name = f"{shard.name}.g_idx"
        if not home.weights.has(name):
            return None
        g_idx = _integers(home.weights.get(name, shape=shard.shape[1:])).long()
        return None if torch.equal(g_idx, torch.arange(shard.shape[1], device="cpu") // group) else g_idx

    def _reordered(self, shard: Shard, home: WeightHome, g_idx: Tensor) -> AffineMatrix:
        """Columns that are spread over groups, decoded and rounded to 8 bits with neighbours."""
        _warn_once()
        whole = self._read_columns(shard, home, slice(0, shard.shape[1]))
        scales = whole.scales.widen()[:, g_idx]
        numbers = whole.codes.float()
        if whole.code_offset:
            numbers -= whole.code_offset
        numbers *= scales
        if whole.minimums is not None:
            numbers += whole.minimums.widen()[:, g_idx]
        return round_weights(numbers[:, shard.columns], EMBEDDING_ROUNDING)


def _integers(data: Any) -> Tensor:
    """A tensor of integers as it is stored."""
    tensor: Tensor = data.tensor
    if tensor is None or tensor.dtype != torch.int32:
        raise UnsupportedModelError(f"{data.where}: tensor '{data.name}' should hold 32-bit integers")
    return tensor


@cache
def _warn_once() -> None:
    logger.warning(
        "GPTQ with act-order has columns of one group apart from each other: they are kept as 8-bit integers, which "
        "takes more memory"
    )
