"""WeightData: what a source hands out, a dense tensor or packed ggml blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.checkpoint.gguf_types import GGMLType
from headrace.errors import CheckpointError
from headrace.loader.ggml_dequantize import dequantize_ggml


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """Numbers in ggml blocks, as they lie in the file.

    Attributes:
        data: uint8 [*shape[:-1], bytes of a row], on the CPU; a row holds whole blocks.
        ggml_type: how a block is coded.
        shape: the shape in numbers.
    """

    data: Tensor
    ggml_type: GGMLType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightData:
    """What a source hands out: a dense tensor, or packed blocks; exactly one of both is set.

    Attributes:
        name: the Hugging Face name, for errors.
        where: the file, for errors.
        tensor: the numbers in their stored dtype, or None.
        packed: the ggml blocks, or None.
    """

    name: str
    where: str
    tensor: Tensor | None = None
    packed: PackedBlocks | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in numbers, also when packed."""
        if self.packed is not None:
            return self.packed.shape
        assert self.tensor is not None
        return tuple(self.tensor.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the stored form."""
        stored = self.tensor if self.packed is None else self.packed.data
        assert stored is not None
        return stored.numel() * stored.element_size()

    def dequantize(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
        """The numbers as a dense tensor of ``dtype`` on ``device`` (by default where the stored data is).

        Packed blocks travel to the device first and are decoded there. When nothing has to be converted the result
        shares the stored data: do not write to it.

        Raises:
            CheckpointError: the tensor is stored as integers or float8, which are not weights without scales.
        """
        if self.packed is None:
            return self._floats().to(device=device, dtype=dtype)
        out = torch.empty(self.shape, dtype=dtype, device=device or self.packed.data.device)
        self.dequantize_into(out)
        return out

    def dequantize_into(self, out: Tensor) -> None:
        """Writes the numbers to ``out`` (same shape, any float dtype, any device, rows contiguous), without a
        second copy of the whole: for layers that gather several tensors in one buffer.

        Raises:
            CheckpointError: the tensor is stored as integers or float8.
        """
        assert tuple(out.shape) == self.shape, f"{self.name}: {tuple(out.shape)} for {self.shape}"
        if self.packed is None:
            out.copy_(self._floats())
        else:
            dequantize_ggml(self.packed.data, self.packed.ggml_type, out)

    def _floats(self) -> Tensor:
        assert self.tensor is not None
        if not self.tensor.is_floating_point() or self.tensor.dtype.itemsize < 2:
            raise CheckpointError(
                f"{self.where}: tensor '{self.name}' is stored as {self.tensor.dtype}, which is no weight without the "
                "scales of its quantization method; that method is not supported"
            )
        return self.tensor
