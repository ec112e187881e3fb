"""GGUFSource: one GGUF file's weights under Hugging Face's names and in its layout; blocks stay packed until asked."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from headrace.checkpoint.gguf_file import GGUFFile, GGUFTensor
from headrace.checkpoint.gguf_types import BLOCK_SIZES, GGMLType
from headrace.checkpoint.model_config import ModelArchitecture
from headrace.errors import CheckpointError, UnsupportedModelError
from headrace.loader.base import Index, PackedBlocks, Progress, WeightData, WeightSource
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

    def _read(self, name: str, index: Index, out: Tensor | None = None) -> WeightData:
        entry = self._file.tensor(self._stored[name])
        dtype = _DENSE.get(entry.ggml_type)
        if dtype is not None:
            return WeightData(name, self.where, tensor=self._part(name, entry, dtype, entry.shape, index))
        self._check_decodable(name, entry)
        if len(entry.shape) > 1:
            return self._read_blocks(name, entry, index)
        data = self._files.read(
            self.where, entry.offset, torch.uint8, (entry.num_bytes,), (slice(0, entry.num_bytes),)
        )
        whole = WeightData(name, self.where, packed=PackedBlocks(data, entry.ggml_type, entry.shape))
        rows = self._take_rows(name, whole.dequantize(torch.float32), index[0])
        return WeightData(name, self.where, tensor=rows)

    def _check_decodable(self, name: str, entry: GGUFTensor) -> None:
        if not can_dequantize(entry.ggml_type):
            known = ", ".join(kind.name for kind in GGMLType if kind in _DENSE or can_dequantize(kind))
            raise UnsupportedModelError(
                f"{self.where}: tensor {self.label(name)} has type {entry.ggml_type.name}, which cannot be decoded "
                f"(known: {known})"
            )

    def _part(
        self, name: str, entry: GGUFTensor, dtype: torch.dtype, shape: tuple[int, ...], index: Index
    ) -> Tensor:
        """``index`` of a tensor [*shape] in the Hugging Face order of its rows."""
        if not self._is_permuted(name) or index[0].start == index[0].stop:
            return self._files.read(self.where, entry.offset, dtype, shape, index)
        every_row = (slice(0, shape[0]), *index[1:])
        rows = self._files.read(self.where, entry.offset, dtype, shape, every_row)
        return self._take_rows(name, rows, index[0])

    def _take_rows(self, name: str, tensor: Tensor, rows: slice) -> Tensor:
        """Rows of the Hugging Face layout, from all of the file's, dense numbers or packed bytes."""
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

    def _read_blocks(self, name: str, entry: GGUFTensor, index: Index) -> WeightData:
        """Part of each packed row: still packed when it begins and ends with a block, else decoded."""
        block_numbers, block_bytes = BLOCK_SIZES[entry.ggml_type]
        row_bytes = entry.shape[-1] // block_numbers * block_bytes
        columns = index[-1]
        first, last = columns.start // block_numbers, -(-columns.stop // block_numbers)
        stored = (*index[:-1], slice(first * block_bytes, last * block_bytes))
        part = self._part(name, entry, torch.uint8, (*entry.shape[:-1], row_bytes), stored)
        shape = (*part.shape[:-1], (last - first) * block_numbers)
        data = WeightData(name, self.where, packed=PackedBlocks(part, entry.ggml_type, shape))
        begin, num_columns = columns.start - first * block_numbers, columns.stop - columns.start
        if num_columns == shape[-1]:
            return data
        tensor = data.dequantize(torch.float32)[..., begin : begin + num_columns]
        return WeightData(name, self.where, tensor=tensor)
