"""A WeightSource over tensors in memory, which notes what it was asked for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headrace.kernels.arena import Arena
from headrace.kernels.registry import Ops
from headrace.layers.context import LayerContext
from headrace.loader.base import Index, WeightData, WeightSource
from headrace.parallel.state import ParallelState

CPU = torch.device("cpu")


class DictWeights(WeightSource):
    """Attributes: read: (name, shape of the part) of every ``get`` of something."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.read: list[tuple[str, tuple[int, ...]]] = []
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        super().__init__("memory", shapes, 0, lambda name: False)

    def _read(self, name: str, index: Index, out: torch.Tensor | None = None) -> WeightData:
        part = self.tensors[name][index]
        if part.numel():
            self.read.append((name, tuple(part.shape)))
        return WeightData(name, "memory", tensor=part)


def context(
    weights: WeightSource,
    parallel: ParallelState | None = None,
    dtype: torch.dtype = torch.float32,
    max_model_len: int | None = None,
) -> LayerContext:
    state = parallel or ParallelState()
    return LayerContext(
        ops=Ops.for_device(CPU, "reference", state.communicator),
        weights=weights,
        dtype=dtype,
        device=CPU,
        arena=Arena(CPU),
        parallel=state,
        max_model_len=max_model_len,
    )


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
