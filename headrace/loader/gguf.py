"""GGUFSource: one GGUF file's weights under Hugging Face's names and in its layout; blocks stay packed until asked."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from headrace.checkpoint.gguf_file import GGUFFile, GGUFTensor
from headrace.checkpoint.gguf_types import BLOCK_SIZES, GGMLType
from headrace.checkpoint.model_config import ModelArchitecture
from headrace.errors import CheckpointError, UnsupportedModelError
from headrace.loader.base import Index, PackedBlocks, Progress, WeightData, WeightSource
from headrace.loader.file_bytes import map_file, tensor_at
from headrace.loader.ggml_dequantize import can_dequantize
from headrace.loader.tensor_names import expected_tensors, gguf_name, is_ignorable

_DENSE: dict[GGMLType, torch.dtype] = {
    GGMLType.F64: torch.float64,
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
    GGMLType.I8: torch.int8,
    GGMLType.I16: torch.int16,
    GGMLType.I32: torch.int32,
    GGMLType.I64: torch.int64,
}

_PERMUTED_ARCHITECTURES = ("llama", "mistral")


class GGUFSource(WeightSource):
    """Reads a GGUF file.

    Files of the llama family hold each head's query and key rows (and biases) interleaved, for a rotary embedding of
    neighbouring pairs: row 2i of a head is Hugging Face's row i, row 2i + 1 its row i + D/2. They are put back here;
    as whole rows move, that works on packed blocks, too.
    """

    def __init__(self, file: GGUFFile, arch: ModelArchitecture, progress: Progress | None = None) -> None:
        names = {gguf_name(name, arch): name for name in expected_tensors(arch)}
        self._file = file
        self._arch = arch
        self._stored = {names.get(stored, stored): stored for stored in file.tensors}
        self._bytes: Tensor | None = None
        super().__init__(
            where=str(file.path),
            shapes={name: file.tensors[stored].shape for name, stored in self._stored.items()},
            total_bytes=sum(entry.num_bytes for entry in file.tensors.values()),
            is_ignorable=lambda name: is_ignorable(name, arch),
            progress=progress,
            stamps={str(file.path): file.stamp},
        )

    @classmethod
    def open(cls, path: Path, arch: ModelArchitecture, progress: Progress | None = None) -> GGUFSource:
        """Reads the file's header.

        Raises:
            CheckpointError: the file is missing, cut or corrupt.
        """
        return cls(GGUFFile.open(path), arch, progress)

    def _let_go(self) -> None:
        self._bytes = None

    def ggml_type(self, name: str) -> GGMLType | None:
        """See ``WeightSource.ggml_type``."""
        stored = self._stored.get(name)
        if stored is None:
            return None
        entry = self._file.tensor(stored)
        return None if entry.ggml_type in _DENSE or len(entry.shape) == 1 else entry.ggml_type

    def label(self, name: str) -> str:
        """Both names of the tensor, since GGUF files have their own."""
        stored = self._stored.get(name) or gguf_name(name, self._arch)
        return f"'{name}'" if stored == name else f"'{name}' (here '{stored}')"

    def _read(self, name: str, index: Index) -> WeightData:
        entry = self._file.tensor(self._stored[name])
        dtype = _DENSE.get(entry.ggml_type)
        if dtype is not None:
            tensor = self._tensor(entry, dtype, entry.shape)
        else:
            self._check_decodable(name, entry)
            packed = self._tensor(
                entry, torch.uint8, (*entry.shape[:-1], entry.num_bytes // prod(entry.shape[:-1]))
            )
            if len(entry.shape) > 1:
                rows = self._take_rows(name, packed, index[0])[(slice(None), *index[1:-1])]
                return self._take_columns(name, rows, entry.ggml_type, index[-1])
            whole = PackedBlocks(packed, entry.ggml_type, entry.shape)
            tensor = WeightData(name, self.where, packed=whole).dequantize(torch.float32)
        return WeightData(
            name, self.where, tensor=self._take_rows(name, tensor, index[0])[(slice(None), *index[1:])]
        )

    def _tensor(self, entry: GGUFTensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A view of the mapped file."""
        if self._bytes is None:
            self._bytes = map_file(self._file.path)
        return tensor_at(self._bytes, entry.offset, entry.offset + entry.num_bytes, dtype, shape)

    def _check_decodable(self, name: str, entry: GGUFTensor) -> None:
        if not can_dequantize(entry.ggml_type):
            known = ", ".join(kind.name for kind in GGMLType if kind in _DENSE or can_dequantize(kind))
            raise UnsupportedModelError(
                f"{self.where}: tensor {self.label(name)} has type {entry.ggml_type.name}, which cannot be decoded "
                f"(known: {known})"
            )

    def _take_rows(self, name: str, tensor: Tensor, rows: slice) -> Tensor:
        """Rows of the Hugging Face layout, from dense numbers or packed bytes."""
        if not self._is_permuted(name):
            return tensor[rows]
        head_dim = self._arch.head_dim
        if len(tensor) % head_dim:
            raise CheckpointError(
                f"{self.where}: tensor {self.label(name)} has {len(tensor)} rows, not whole heads of {head_dim}"
            )
        row = torch.arange(rows.start, rows.stop, device="cpu")
        place, half = row % head_dim, head_dim // 2
        return tensor[row - place + 2 * (place % half) + place // half]

    def _is_permuted(self, name: str) -> bool:
        return (
            self._arch.architecture in _PERMUTED_ARCHITECTURES
            and name.startswith("model.layers.")
            and (".self_attn.q_proj." in name or ".self_attn.k_proj." in name)
        )

    def _take_columns(self, name: str, packed: Tensor, ggml_type: GGMLType, columns: slice) -> WeightData:
        """Part of each packed row: still packed when it begins and ends with a block, else decoded."""
        block_numbers, block_bytes = BLOCK_SIZES[ggml_type]
        first, last = columns.start // block_numbers, -(-columns.stop // block_numbers)
        part = packed[..., first * block_bytes : last * block_bytes]
        shape = (*packed.shape[:-1], (last - first) * block_numbers)
        data = WeightData(name, self.where, packed=PackedBlocks(part, ggml_type, shape))
        begin, num_columns = columns.start - first * block_numbers, columns.stop - columns.start
        if num_columns == shape[-1]:
            return data
        tensor = data.dequantize(torch.float32)[..., begin : begin + num_columns]
        return WeightData(name, self.where, tensor=tensor)
