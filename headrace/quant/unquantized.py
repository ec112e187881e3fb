"""Dense matrices: what is stored, dequantized if need be, in the compute type or a narrower stored one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.registry import Ops
from headrace.loader.weight_data import WeightData
from headrace.quant.base import LoadedLinear, QuantMethod, Shard, WeightHome


class DenseLinear(LoadedLinear):
    """A matrix in a float type.

    Args:
        ops: where ``linear`` is.
        weight: [n, in], in the form that ``pack_weight`` gave it.
        bias: [n] or None.
    """

    def __init__(self, ops: Ops, weight: Any, bias: Tensor | None) -> None:
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
        stored = [
            home.weights.get(f"{shard.name}.weight", (shard.rows, shard.columns), shape=shard.shape)
            for shard in shards
        ]
        dtype = common_weight_dtype(stored, home)
        weight = torch.empty((num_rows, num_columns), dtype=dtype, device=home.device)
        bias = None
        if any(shard.has_bias for shard in shards):
            bias = torch.zeros(num_rows, dtype=home.dtype, device=home.device)
        start = 0
        for shard, data in zip(shards, stored, strict=True):
            end = start + shard.num_rows
            data.dequantize_into(weight[start:end])
            if shard.has_bias and bias is not None:
                name, shape = f"{shard.name}.bias", shard.shape[:1]
                home.weights.get(name, (shard.rows,), shape=shape).dequantize_into(bias[start:end])
            start = end
        return DenseLinear(home.ops, home.ops.pack_weight(weight), bias)


def common_weight_dtype(stored: Sequence[WeightData], home: WeightHome) -> torch.dtype:
    """The type to keep matrices in that are multiplied as one: a narrower one only if all are stored in it."""
    wanted = {
        home.dtype if data.tensor is None else home.ops.weight_dtype(data.tensor.dtype, home.dtype)
        for data in stored
    }
    return wanted.pop() if len(wanted) == 1 else home.dtype


UNQUANTIZED = UnquantizedMethod()
