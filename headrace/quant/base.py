"""QuantMethod: how one kind of stored weight becomes something that a linear layer can multiply with.

A linear layer is a list of shards (q, k, v; gate, up), each a matrix of the checkpoint with a method of its own.
Neighbours with the same method are loaded together and multiplied in one op.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.kernels.registry import Ops
from headrace.loader.base import WeightSource
from headrace.quant.precision import Precision


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one stored matrix that this rank multiplies with.

    Attributes:
        name: the module's name in the checkpoint ("model.layers.0.self_attn.q_proj").
        shape: the whole matrix, (rows = outputs, columns = inputs).
        rows, columns: this rank's part.
        has_bias: whether this rank adds the module's bias.
    """

    name: str
    shape: tuple[int, int]
    rows: slice
    columns: slice
    has_bias: bool

    @property
    def num_rows(self) -> int:
        """Outputs of this rank."""
        return int(self.rows.stop - self.rows.start)

    @property
    def num_columns(self) -> int:
        """Inputs of this rank."""
        return int(self.columns.stop - self.columns.start)

    def check_groups(self, group_columns: int) -> None:
        """Raises ConfigError where this rank's columns begin or end inside a group."""
        if self.columns.start % group_columns == 0 and (
            self.columns.stop % group_columns == 0 or self.columns.stop == self.shape[1]
        ):
            return
        total = self.shape[1]
        sizes = [
            n for n in range(1, total // group_columns + 1) if total % n == total // n % group_columns == 0
        ]
        raise ConfigError(
            f"tensor_parallel_size {total // self.num_columns} cuts the {total} columns of '{self.name}' inside a "
            f"group of {group_columns}, whose numbers share a scale; possible sizes: {', '.join(map(str, sizes))}"
        )


@dataclass(frozen=True, slots=True)
class WeightHome:
    """Where loaded weights go: read from ``weights``, kept as ``dtype`` on ``device``, multiplied by ``ops``.

    quantization: the checkpoint's own description of it (``ModelArchitecture.quantization``).
    precision: the user's wishes.
    """

    weights: WeightSource
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    quantization: Mapping[str, Any] | None = None
    precision: Precision = field(default_factory=Precision)

    @property
    def has_packed_kernels(self) -> bool:
        """Whether packed matrices are multiplied faster here than dense ones; the reference decodes them each time."""
        return self.ops.is_fast("linear_packed")

    @property
    def input_bits(self) -> int:
        """To how many bits inputs of packed matrices are rounded: 8, 16, or 32, which is not at all."""
        wish = self.precision.inputs
        if wish == "auto":
            wish = "int16" if self.device.type == "cpu" and self.has_packed_kernels else "float"
        return {"int8": 8, "int16": 16, "float": 32}[wish]


class LoadedLinear(ABC):
    """Loaded shards, one below the other."""

    @abstractmethod
    def apply(self, x: Tensor, out: Tensor, col: int) -> None:
        """Writes the shards' outputs [T, n] for x [T, in] to ``out[:, col : col + n]``, through ops only."""


class QuantMethod(ABC):
    """One way of storing the matrices of linear layers. Methods hold no weights, so equal ones are the same object, or
    compare equal."""

    @property
    @abstractmethod
    def form(self) -> str:
        """What matrices are kept in, in a word, for people."""

    @abstractmethod
    def load(self, shards: Sequence[Shard], home: WeightHome) -> LoadedLinear:
        """Reads this rank's part of shards with equal inputs, and nothing more.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
            ConfigError: this rank's part begins or ends inside a group that shares a scale.
        """

    @abstractmethod
    def read_dense(self, shard: Shard, home: WeightHome) -> Tensor:
        """This rank's part of one matrix as plain numbers, [rows, columns] fp32 (or as stored, if of a float type)."""


def load_bias(shards: Sequence[Shard], home: WeightHome, dtype: torch.dtype) -> Tensor | None:
    """The biases of shards one after the other, zeros where a shard has none; None where none has."""
    if not any(shard.has_bias for shard in shards):
        return None
    bias = torch.zeros(sum(shard.num_rows for shard in shards), dtype=dtype, device=home.device)
    start = 0
    for shard in shards:
        end = start + shard.num_rows
        if shard.has_bias:
            stored = home.weights.get(f"{shard.name}.bias", (shard.rows,), shape=shard.shape[:1])
            stored.dequantize_into(bias[start:end])
        start = end
    return bias
