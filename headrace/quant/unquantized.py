"""Dense matrices: what is stored, dequantized if need be, in the compute type or a narrower stored one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.registry import Ops
from headrace.loader.weight_data import WeightData
from headrace.quant.base import LoadedLinear, QuantMethod, Shard, WeightHome, load_bias


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

    @property
    def form(self) -> str:
        return "dense"

    def load(self, shards: Sequence[Shard], home: WeightHome) -> DenseLinear:
        num_rows = sum(shard.num_rows for shard in shards)
        [num_columns] = {shard.num_columns for shard in shards}
        nothing = (slice(0, 0),)  # tells types without reading, so that numbers are read to where they stay
        stored = [home.weights.get(f"{each.name}.weight", nothing, shape=each.shape) for each in shards]
        dtype = common_weight_dtype(stored, home)
        weight = torch.empty((num_rows, num_columns), dtype=dtype, device=home.device)
        start = 0
        for shard in shards:
            part = weight[start : start + shard.num_rows]
            data = home.weights.get(
                f"{shard.name}.weight", (shard.rows, shard.columns), shape=shard.shape, out=part
            )
            data.dequantize_into(part)
            start += shard.num_rows
        return DenseLinear(home.ops, home.ops.pack_weight(weight), load_bias(shards, home, home.dtype))

    def read_dense(self, shard: Shard, home: WeightHome) -> Tensor:
        stored = home.weights.get(f"{shard.name}.weight", (shard.rows, shard.columns), shape=shard.shape)
        return stored.dequantize(torch.float32 if stored.tensor is None else stored.tensor.dtype)


def common_weight_dtype(stored: Sequence[WeightData], home: WeightHome) -> torch.dtype:
    """The type to keep matrices in that are multiplied as one: a narrower one only if all are stored in it."""
    wanted = {
        home.dtype if data.tensor is None else home.ops.weight_dtype(data.tensor.dtype, home.dtype)
        for data in stored
    }
    return wanted.pop() if len(wanted) == 1 else home.dtype


UNQUANTIZED = UnquantizedMethod()


@dataclass(frozen=True, slots=True)
class DequantizedMethod(QuantMethod):
    """Matrices that ``stored`` reads, kept dense in the compute type."""

    stored: QuantMethod

    @property
    def form(self) -> str:
        return "dense"

    def load(self, shards: Sequence[Shard], home: WeightHome) -> DenseLinear:
        parts = [self.read_dense(shard, home).to(home.dtype) for shard in shards]
        weight = home.ops.pack_weight(torch.cat(parts).to(home.device))
        return DenseLinear(home.ops, weight, load_bias(shards, home, home.dtype))

    def read_dense(self, shard: Shard, home: WeightHome) -> Tensor:
        return self.stored.read_dense(shard, home)
