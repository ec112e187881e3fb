"""What the tests of quantized formats share: a home for weights, shards, and packing integers into words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from headrace.checkpoint.gguf_types import GGMLType
from headrace.kernels.registry import Ops
from headrace.loader.base import Index, WeightData
from headrace.loader.weight_data import PackedBlocks
from headrace.quant.base import Shard, WeightHome
from headrace.quant.packed import PackedMethod
from headrace.quant.precision import Precision
from tests.layers.dict_weights import DictWeights, context


class FastReferenceOps(Ops):
    """Plain torch ops that pass for fast ones."""

    def is_fast(self, name: str) -> bool:
        return True


def home(
    tensors: Mapping[str, torch.Tensor],
    quantization: Mapping[str, Any] | None = None,
    precision: Precision | None = None,
    *,
    is_fast: bool = False,
) -> WeightHome:
    """Weights in memory, kept in fp32, multiplied by plain torch ops."""
    return home_of(DictWeights(tensors), quantization, precision, is_fast=is_fast)


def home_of(
    weights: DictWeights,
    quantization: Mapping[str, Any] | None = None,
    precision: Precision | None = None,
    *,
    is_fast: bool = False,
) -> WeightHome:
    """The same with any source."""
    plain = context(weights).weight_home
    ops = FastReferenceOps(plain.ops.table) if is_fast else plain.ops
    return replace(plain, ops=ops, quantization=quantization, precision=precision or Precision())


def shard(
    name: str, shape: tuple[int, int], rows: slice | None = None, columns: slice | None = None
) -> Shard:
    """A part of a matrix; the whole by default."""
    return Shard(name, shape, rows or slice(0, shape[0]), columns or slice(0, shape[1]), has_bias=False)


def read(method: PackedMethod, part: Shard, where: WeightHome) -> torch.Tensor:
    """What the method reads, as plain numbers."""
    return method.read(part, where).dequantize()


def pack_words(numbers: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """[n, m] integers below 2^bits -> int32 [n, m * bits / 32]; number i of a word goes to field ``order[i]``."""
    per_word = 32 // bits
    fields = numbers.long().view(len(numbers), -1, per_word)
    words = torch.zeros(fields.shape[:2], dtype=torch.int64)
    for index in range(per_word):
        words |= fields[..., index] << (bits * (index if order is None else order[index]))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


class BlockWeights(DictWeights):
    """Some of the matrices are ggml blocks."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], blocks: Mapping[str, PackedBlocks]) -> None:
        shapes = {name: torch.empty(packed.shape, device="meta") for name, packed in blocks.items()}
        super().__init__({**tensors, **shapes})
        self._blocks = blocks

    def ggml_type(self, name: str) -> GGMLType | None:
        return self._blocks[name].ggml_type if name in self._blocks else None

    def _read(self, name: str, index: Index, out: Any = None) -> WeightData:
        if name not in self._blocks:
            return super()._read(name, index)
        packed = self._blocks[name]
        num_columns = packed.shape[1]
        row_bytes = packed.data.shape[1]
        first, last = (bound * row_bytes // num_columns for bound in (index[1].start, index[1].stop))
        data = packed.data[index[0], first:last]
        shape = (len(data), index[1].stop - index[1].start)
        return WeightData(name, "memory", packed=PackedBlocks(data, packed.ggml_type, shape))
