"""compressed-tensors checkpoints with integer linears: formats "pack-quantized" (4 or 8 bits) and "int-quantized".

w = scale * (code - zero point). Packed codes lie in 32-bit words along the inputs, shifted by 2^(bits-1); packed zero
points lie in words along the outputs, shifted alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.errors import UnsupportedModelError
from headrace.kernels.affine_matrix import AffineMatrix
from headrace.quant.base import Shard, WeightHome
from headrace.quant.packed import PackedMethod
from headrace.quant.words import affine_from_zero_points, check_config, unpack_words

_FORMATS = ("pack-quantized", "int-quantized")


@dataclass(frozen=True, slots=True)
class CompressedTensorsMethod(PackedMethod):
    """Attributes:
    bits: 4 or 8.
    group_columns: None: one group for all columns.
    is_packed: whether codes lie in words.
    is_symmetric: whether there are no zero points.
    """

    bits: int
    group_columns: int | None
    is_packed: bool
    is_symmetric: bool

    @property
    def form(self) -> str:
        return f"compressed-tensors int{self.bits}"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> CompressedTensorsMethod | None:
        """The method of the module ``name``; None: it is not quantized.

        Raises:
            UnsupportedModelError: another format, another type, or bits other than 4 and 8.
        """
        if any(_matches(pattern, name) for pattern in config.get("ignore") or ()):
            return None
        for group in (config.get("config_groups") or {}).values():
            if any(_matches(target, name) for target in group.get("targets") or ()):
                return cls._from_group(group, group.get("format") or config.get("format"))
        return None

    @classmethod
    def _from_group(cls, group: Mapping[str, Any], layout: str | None) -> CompressedTensorsMethod:
        weights = group.get("weights") or {}
        found = {
            "format": layout,
            "type": weights.get("type", "int"),
            "num_bits": weights.get("num_bits"),
            "strategy": weights.get("strategy", "group" if weights.get("group_size") else "channel"),
            "actorder": weights.get("actorder"),
        }
        known: dict[str, tuple[object, ...]] = {
            "format": _FORMATS,
            "type": ("int",),
            "num_bits": (4, 8),
            "strategy": ("group", "channel", "tensor"),
            "actorder": (None, False, "weight", "static"),
        }
        wrong = check_config(known, found, "compressed-tensors")
        if wrong:
            raise UnsupportedModelError(wrong)
        size = int(weights.get("group_size") or -1) if found["strategy"] == "group" else -1
        is_symmetric = bool(weights.get("symmetric", True))
        return cls(int(weights["num_bits"]), None if size <= 0 else size, layout == _FORMATS[0], is_symmetric)

    def read(self, shard: Shard, home: WeightHome) -> AffineMatrix:
        if self.group_columns is not None:
            shard.check_groups(self.group_columns)
        group = self.group_columns or shard.shape[1]
        codes = self._packed_codes(shard, home) if self.is_packed else self._plain_codes(shard, home)
        num_groups = -(-shard.shape[1] // group)
        groups = slice(shard.columns.start // group, -(-shard.columns.stop // group))
        scales = self._by_row(shard, home, "weight_scale", groups, num_groups).float()
        zeros = None
        if not self.is_symmetric:
            zeros = self._zero_points(shard, home, groups, num_groups)
        return affine_from_zero_points(codes, self.bits, min(group, codes.shape[1]), scales, zeros)

    def _check_shape(self, shard: Shard, home: WeightHome) -> None:
        """Against what a packed matrix says of itself: its words may be padded."""
        name = f"{shard.name}.weight_shape"
        if not home.weights.has(name):
            return
        stored = home.weights.get(name, shape=(2,))
        if stored.tensor is None or stored.tensor.tolist() != list(shard.shape):
            told = None if stored.tensor is None else stored.tensor.tolist()
            raise UnsupportedModelError(
                f"{stored.where}: '{stored.name}' says {told}, but the model needs {list(shard.shape)}"
            )

    def _packed_codes(self, shard: Shard, home: WeightHome) -> Tensor:
        self._check_shape(shard, home)
        per_word = 32 // self.bits
        words = slice(shard.columns.start // per_word, -(-shard.columns.stop // per_word))
        shape = (shard.shape[0], -(-shard.shape[1] // per_word))
        stored = home.weights.get(f"{shard.name}.weight_packed", (shard.rows, words), shape=shape)
        assert stored.tensor is not None
        start = shard.columns.start - words.start * per_word
        return unpack_words(stored.tensor, self.bits)[:, start : start + shard.num_columns].contiguous()

    def _plain_codes(self, shard: Shard, home: WeightHome) -> Tensor:
        stored = home.weights.get(f"{shard.name}.weight", (shard.rows, shard.columns), shape=shard.shape)
        if stored.tensor is None or stored.tensor.dtype != torch.int8:
            raise UnsupportedModelError(f"{stored.where}: '{stored.name}' should hold 8-bit integers")
        middle = 1 << (self.bits - 1)
        return (stored.tensor.to(torch.int16) + middle).to(torch.uint8)

    def _by_row(self, shard: Shard, home: WeightHome, what: str, groups: slice, num_groups: int) -> Tensor:
        """[this rank's rows, groups]; one number for the whole matrix is repeated."""
        name = f"{shard.name}.{what}"
        if home.weights.shape(name) in ((1,), (1, 1)) and shard.shape[0] > 1:
            stored = home.weights.get(name).tensor
            assert stored is not None
            return stored.reshape(1, 1).expand(shard.num_rows, 1)
        stored = home.weights.get(name, (shard.rows, groups), shape=(shard.shape[0], num_groups)).tensor
        assert stored is not None
        return stored

    def _zero_points(self, shard: Shard, home: WeightHome, groups: slice, num_groups: int) -> Tensor:
        middle = 1 << (self.bits - 1)
        if not self.is_packed:
            return self._by_row(shard, home, "weight_zero_point", groups, num_groups).int() + middle
        per_word = 32 // self.bits
        words = slice(shard.rows.start // per_word, -(-shard.rows.stop // per_word))
        name, shape = f"{shard.name}.weight_zero_point", (-(-shard.shape[0] // per_word), num_groups)
        stored = home.weights.get(name, (words, groups), shape=shape).tensor
        assert stored is not None
        first = shard.rows.start - words.start * per_word
        return unpack_words(stored.t(), self.bits)[:, first : first + shard.num_rows].t().int()


def _matches(pattern: str, name: str) -> bool:
    """Whether a target or an ignored entry means the linear module ``name``."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return pattern == name or (pattern == "Linear" and name != "model.embed_tokens")
