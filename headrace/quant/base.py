"""QuantMethod: how one kind of stored weight becomes something that a linear layer can multiply with.

A linear layer is a list of shards (q, k, v; gate, up), each a matrix of the checkpoint with a method of its own.
Neighbours with the same method are loaded together and multiplied in one op.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.errors import UnsupportedModelError
from headrace.kernels.registry import Ops
from headrace.loader.base import WeightSource


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


@dataclass(frozen=True, slots=True)
class WeightHome:
    """Where loaded weights go: read from ``weights``, kept as ``dtype`` on ``device``, multiplied by ``ops``."""

    weights: WeightSource
    ops: Ops
    dtype: torch.dtype
    device: torch.device


class LoadedLinear(ABC):
    """Loaded shards, one below the other."""

    @abstractmethod
    def apply(self, x: Tensor, out: Tensor, col: int) -> None:
        """Writes the shards' outputs [T, n] for x [T, in] to ``out[:, col : col + n]``, through ops only."""


class QuantMethod(ABC):
    """One way of storing the matrices of linear layers. Methods hold no weights, so equal ones are the same object."""

    @abstractmethod
    def load(self, shards: Sequence[Shard], home: WeightHome) -> LoadedLinear:
        """Reads this rank's part of shards with equal inputs, and nothing more.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """


def select_method(quantization: Mapping[str, Any] | None, name: str) -> QuantMethod:
    """The method of the module ``name`` of a checkpoint.

    Args:
        quantization: ``ModelArchitecture.quantization``.

    Raises:
        UnsupportedModelError: the checkpoint's quantization is not known.
    """
    from headrace.quant.unquantized import UNQUANTIZED

    method = "none" if quantization is None else quantization.get("quant_method")
    if method not in ("none", "gguf"):
        raise UnsupportedModelError(
            f"the weights of '{name}' are quantized with {method!r}, which is not supported (known: gguf, or none)"
        )
    return UNQUANTIZED
