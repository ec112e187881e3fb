"""SafetensorsSource: a Hugging Face folder's weights, each tensor, or the slice of it, when it is asked for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from headrace.checkpoint.model_config import ModelArchitecture
from headrace.checkpoint.safetensors_index import SafetensorsEntry, SafetensorsIndex
from headrace.errors import UnsupportedModelError
from headrace.loader.base import Index, Progress, WeightData, WeightSource
from headrace.loader.tensor_names import hf_name, is_ignorable, is_norm

_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class SafetensorsSource(WeightSource):
    """Reads ``*.safetensors``.

    Hugging Face stores Gemma's norm weights w for use as (1 + w). This source, and nothing else, adds the 1 (in fp32,
    the result's dtype), so that models always see the factor itself, as GGUF files have it.
    """

    def __init__(
        self, index: SafetensorsIndex, arch: ModelArchitecture, progress: Progress | None = None
    ) -> None:
        stored_names = frozenset(index.entries)
        self._entries: dict[str, SafetensorsEntry] = {
            hf_name(stored, stored_names): entry for stored, entry in index.entries.items()
        }
        self._adds_one_to_norms = arch.architecture == "gemma3"
        super().__init__(
            where=str(index.folder),
            shapes={name: entry.shape for name, entry in self._entries.items()},
            total_bytes=sum(entry.end - entry.begin for entry in self._entries.values()),
            is_ignorable=lambda name: is_ignorable(name, arch),
            progress=progress,
            stamps=index.stamps,
        )

    @classmethod
    def open(
        cls, folder: Path, arch: ModelArchitecture, progress: Progress | None = None
    ) -> SafetensorsSource:
        """Reads the headers of the folder's files.

        Raises:
            CheckpointError: no weights, only pickled ones, a missing shard or a corrupt file.
        """
        return cls(SafetensorsIndex.open(folder), arch, progress)

    def file_of(self, name: str) -> str:
        """The shard that holds the tensor."""
        return str(self._entries[name].file)

    def _read(self, name: str, index: Index, out: Tensor | None = None) -> WeightData:
        entry = self._entries[name]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise UnsupportedModelError(
                f"{entry.file}: tensor '{name}' has dtype {entry.dtype}, which is not supported (supported: "
                f"{', '.join(_DTYPES)})"
            )
        tensor = self._files.read(str(entry.file), entry.begin, dtype, entry.shape, index, out)
        if self._adds_one_to_norms and is_norm(name):
            tensor = tensor.float() + 1.0
        return WeightData(name, str(entry.file), tensor=tensor)
