"""LayerContext: what layers are built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.kernels.arena import Arena, Buffer
from headrace.kernels.registry import Ops
from headrace.loader.base import WeightSource
from headrace.parallel.pipeline import PipelineStage
from headrace.parallel.state import ParallelState
from headrace.quant.base import WeightHome
from headrace.quant.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """Handed to every layer's constructor, which loads its weights at once.

    Attributes:
        ops: the device's op table.
        weights: where tensors come from.
        dtype: compute type of weights and activations.
        device: where both are.
        arena: the buffers of activations.
        parallel: this rank.
        stage: its part of the layers.
        max_model_len: tokens that rotary tables must cover; None, until the model fills it in: the context that the
            checkpoint vouches for.
        quantization: the checkpoint's own description of it; set by the model.
        precision: in which form the user wants weights kept.
    """

    ops: Ops
    weights: WeightSource
    dtype: torch.dtype
    device: torch.device
    arena: Arena
    parallel: ParallelState = field(default_factory=ParallelState)
    stage: PipelineStage = field(default_factory=PipelineStage)
    max_model_len: int | None = None
    quantization: Mapping[str, Any] | None = None
    precision: Precision = field(default_factory=Precision)

    def buffer(self, name: str, width: int) -> Buffer:
        """An arena buffer of the compute type."""
        return self.arena.buffer(name, width, self.dtype)

    @property
    def weight_home(self) -> WeightHome:
        """The part that loading a linear needs."""
        return WeightHome(self.weights, self.ops, self.dtype, self.device, self.quantization, self.precision)
