"""Matrices that stay small integers in memory: what all such methods share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.affine_matrix import AffineMatrix
from headrace.kernels.registry import Ops
from headrace.quant.base import LoadedLinear, QuantMethod, Shard, WeightHome, load_bias


class PackedLinear(LoadedLinear):
    """A matrix of small integers.

    Args:
        ops: where ``linear_packed`` is.
        matrix: what ``pack_matrix`` of the same ops made.
        bias: [n] fp32 or None.
        input_bits: see ``WeightHome``.
    """

    def __init__(
        self,
        ops: Ops,
        matrix: Any,
        bias: Tensor | None,
        input_bits: int,
    ) -> None:
        self._ops = ops
        self.matrix = matrix
        self.bias = bias
        self._input_bits = input_bits

    def apply(self, x: Tensor, out: Tensor, col: int) -> None:
        self._ops.linear_packed(x, self.matrix, self.bias, out, col, self._input_bits)


class PackedMethod(QuantMethod):
    """Subclasses say in ``read`` where codes and scales come from."""

    @abstractmethod
    def read(self, shard: Shard, home: WeightHome) -> AffineMatrix:
        """This rank's part of one matrix."""

    def load(self, shards: Sequence[Shard], home: WeightHome) -> LoadedLinear:
        packed = self.load_matrix(shards, home)
        bias = load_bias(shards, home, torch.float32)
        return PackedLinear(home.ops, packed, bias, home.input_bits)

    def load_matrix(self, shards: Sequence[Shard], home: WeightHome) -> Any:
        """The shards one below the other, packed for the device's kernels."""
        matrix = AffineMatrix.stack([self.read(shard, home) for shard in shards])
        return home.ops.pack_matrix(matrix.to(home.device))

    def read_dense(self, shard: Shard, home: WeightHome) -> Tensor:
        return self.read(shard, home).dequantize()
