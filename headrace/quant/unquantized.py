"""Dense matrices: what is stored, dequantized if need be, in the compute type."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels.registry import Ops
from headrace.quant.base import LoadedLinear, QuantMethod, Shard, WeightHome


class DenseLinear(LoadedLinear):
    """A matrix in the compute type.

    Args:
        ops: where ``linear`` is.
        weight: [n, in], in the form that ``pack_weight`` gave it.
        bias: [n] or None.
    """

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None) -> None:
        self._ops = ops
        self.weight = weight
        self.bias = bias

    def apply(self, x: Tensor, out: Tensor, col: int) -> None:
        self._ops.linear(x, self.weight, self.bias, out, col)


class UnquantizedMethod(QuantMethod):
    """Also runs checkpoints with quantized tensors that the source can decode (GGUF)."""

    def load(self, shards: Sequence[Shard], home: WeightHome) -> DenseLinear:
        num_rows = sum(shard.num_rows for shard in shards)
        [num_columns] = {shard.num_columns for shard in shards}
        weight = torch.empty((num_rows, num_columns), dtype=home.dtype, device=home.device)
        bias = None
        if any(shard.has_bias for shard in shards):
            bias = torch.zeros(num_rows, dtype=home.dtype, device=home.device)
        start = 0
        for shard in shards:
            end = start + shard.num_rows
            stored = home.weights.get(f"{shard.name}.weight", (shard.rows, shard.columns), shape=shard.shape)
            stored.dequantize_into(weight[start:end])
            if shard.has_bias and bias is not None:
                name, shape = f"{shard.name}.bias", shard.shape[:1]
                home.weights.get(name, (shard.rows,), shape=shape).dequantize_into(bias[start:end])
            start = end
        return DenseLinear(home.ops, home.ops.pack_weight(weight), bias)


UNQUANTIZED = UnquantizedMethod()
