"""DummySource: random weights from an architecture alone, for benchmarks and tests of any size."""

from __future__ import annotations

import hashlib
from math import prod

import torch
from torch import Tensor

from headrace.checkpoint.model_config import ModelArchitecture
from headrace.loader.base import Index, Progress, WeightData, WeightSource
from headrace.loader.tensor_names import expected_tensors, is_norm

_POOL_NUMBERS = 1 << 22
# Odd, hence coprime with the pool's size: the rows of a tensor start at places that are all different.
_ROW_STRIDE = 0x9E3779B1
_BIAS_STD = 0.02
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DummySource(WeightSource):
    """Weights that look random, made as fast as memory is written.

    A row of a tensor is a window of one pool of normal numbers; where it starts is a function of (seed, name, row),
    so a slice equals the same slice of the whole, on every rank and device. A matrix [n, m] has standard deviation
    m^-0.5 (0.02 where m is 2,500), which keeps activations and logits near 1 at every size; norm weights are 1. They
    come in the architecture's stored dtype, as a checkpoint's would.
    """

    def __init__(
        self,
        arch: ModelArchitecture,
        seed: int = 0,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
    ) -> None:
        shapes = expected_tensors(arch)
        self._dtype = _DTYPES.get(arch.torch_dtype or "", torch.float32)
        self._seed = seed
        self._factors_tensor = arch.rope.scaling.factors_tensor
        # Made on the CPU, since other devices draw other numbers from the same seed. Its start is repeated at the
        # end, so that a window may begin anywhere.
        pool = torch.randn(
            _POOL_NUMBERS, dtype=torch.float32, generator=torch.Generator().manual_seed(seed), device="cpu"
        )
        longest_row = max(shape[-1] for shape in shapes.values())
        self._pool = torch.cat((pool, pool[:longest_row])).to(device)
        self._scaled_pools: dict[float, Tensor] = {}
        super().__init__(
            where="dummy weights",
            shapes=shapes,
            total_bytes=sum(map(prod, shapes.values())) * self._dtype.itemsize,
            is_ignorable=lambda name: False,
            progress=progress,
        )

    def _read(self, name: str, index: Index, out: Tensor | None = None) -> WeightData:
        shape, columns = self.shape(name), index[-1]
        if is_norm(name) or name == self._factors_tensor:
            ones = torch.ones(columns.stop - columns.start, dtype=self._dtype, device=self._pool.device)
            return WeightData(name, self.where, tensor=ones)
        if len(shape) == 1:
            return WeightData(
                name, self.where, tensor=self._windows(name, slice(0, 1), columns, _BIAS_STD)[0]
            )
        return WeightData(name, self.where, tensor=self._windows(name, index[0], columns, shape[1] ** -0.5))

    def _windows(self, name: str, rows: slice, columns: slice, std: float) -> Tensor:
        """[rows, columns]: row r is the window of the pool that begins at its own place."""
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        offset = int.from_bytes(digest, "little") % _POOL_NUMBERS
        row = torch.arange(rows.start, rows.stop, device=self._pool.device)
        starts = (row * _ROW_STRIDE + offset) % _POOL_NUMBERS
        pool = self._scaled_pool(std)[columns.start :]
        return pool.as_strided((_POOL_NUMBERS, columns.stop - columns.start), (1, 1)).index_select(0, starts)

    def _scaled_pool(self, std: float) -> Tensor:
        if std not in self._scaled_pools:
            self._scaled_pools[std] = (self._pool * std).to(self._dtype)
        return self._scaled_pools[std]
