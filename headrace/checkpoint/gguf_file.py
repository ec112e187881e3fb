"""GGUFFile: the header of a GGUF file, read with struct, and where its tensors lie.

The ``gguf`` package's own reader makes numpy objects of every vocabulary entry and takes seconds; this one walks the
header once and decodes vocabularies when they are asked for. Format: GGUF versions 2 and 3, little endian.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from headrace.checkpoint.file_stamp import FileStamp
from headrace.checkpoint.gguf_header import GGUFStrings, GGUFValue, HeaderReader
from headrace.checkpoint.gguf_types import BLOCK_SIZES, GGMLType
from headrace.checkpoint.header_bytes import HeaderBytes
from headrace.errors import CheckpointError, UnsupportedModelError

MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
MIN_KEY_BYTES = 8 + 4 + 1
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. ``shape`` is row-major (torch order); ``offset`` counts from the file's first byte."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class GGUFFile:
    """``metadata`` (string arrays decode on first use), ``tensors`` by name, and what the
    file was when its header was read."""

    path: Path
    stamp: FileStamp
    metadata: Mapping[str, GGUFValue]
    tensors: Mapping[str, GGUFTensor]

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Reads the file's header.

        Raises:
            CheckpointError: the file is missing, cut or corrupt; the message names the file and the key or tensor.
        """
        path = Path(path)
        file = HeaderBytes(path, 4, "GGUF")
        reader = HeaderReader(file)
        num_tensors, num_keys = _read_preamble(reader)
        metadata = _read_metadata(reader, num_keys)
        _refuse_parts(path, metadata)
        tensors = _read_tensors(reader, num_tensors, _alignment(path, metadata))
        return cls(path, file.stamp, MappingProxyType(metadata), MappingProxyType(tensors))

    def tensor(self, name: str) -> GGUFTensor:
        """The index entry of one tensor.

        Raises:
            CheckpointError: the file has no such tensor.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.path}: tensor '{name}' is missing; the file has {len(self.tensors)} others"
            )
        return entry


def _read_preamble(reader: HeaderReader) -> tuple[int, int]:
    magic = bytes(reader.take(4, "the magic number"))
    if magic != b"GGUF":
        raise CheckpointError(f"{reader.path}: not a GGUF file (it starts with {magic!r}, not b'GGUF')")
    version = reader.uint32("the version")
    if version not in (2, 3):
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
            raise CheckpointError(
                f"{reader.path}: big-endian GGUF is not supported; convert it to little endian"
            )
        raise CheckpointError(
            f"{reader.path}: GGUF version {version} is not supported (known: 2, 3); convert it anew"
        )
    num_tensors, num_keys = reader.uint64("the tensor count"), reader.uint64("the key count")
    reader.check_room(num_keys, MIN_KEY_BYTES, "metadata keys")
    reader.check_room(num_tensors, MIN_TENSOR_BYTES, "tensors")
    return num_tensors, num_keys


def _read_metadata(reader: HeaderReader, num_keys: int) -> dict[str, GGUFValue]:
    metadata: dict[str, GGUFValue] = {}
    for index in range(num_keys):
        key = reader.string(f"metadata key number {index}")
        if not key or key in metadata:
            problem = "is there twice" if key else "is empty"
            raise CheckpointError(f"{reader.path}: metadata key '{key}' (number {index}) {problem}")
        metadata[key] = reader.value(key)
    return metadata


def _refuse_parts(path: Path, metadata: Mapping[str, GGUFValue]) -> None:
    count = metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        raise UnsupportedModelError(
            f"{path}: is one of {count} parts of a split model; join them first with llama.cpp's gguf-split --merge"
        )


def _alignment(path: Path, metadata: Mapping[str, GGUFValue]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise CheckpointError(
            f"{path}: key 'general.alignment' is {value!r}, not a power of two up to {MAX_ALIGNMENT}"
        )
    return value


def _read_tensors(reader: HeaderReader, num_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    entries: dict[str, GGUFTensor] = {}
    for index in range(num_tensors):
        entry = _read_tensor(reader, index, alignment)
        if entry.name in entries:
            raise CheckpointError(f"{reader.path}: tensor '{entry.name}' is there twice")
        entries[entry.name] = entry
    start = -(-reader.position // alignment) * alignment
    placed = {
        name: GGUFTensor(name, entry.shape, entry.ggml_type, start + entry.offset, entry.num_bytes)
        for name, entry in entries.items()
    }
    _check_places(reader, placed)
    return placed


def _read_tensor(reader: HeaderReader, index: int, alignment: int) -> GGUFTensor:
    """Reads one index entry; its ``offset`` still counts from the start of the data section."""
    path = reader.path
    name = reader.string(f"the name of tensor number {index}")
    what = f"the entry of tensor '{name}'"
    num_dims = reader.uint32(what)
    if not name or not 1 <= num_dims <= MAX_DIMS:
        raise CheckpointError(
            f"{path}: tensor '{name}' (number {index}) has {num_dims} dimensions, not 1 to {MAX_DIMS}"
        )
    dims = [reader.uint64(what) for _ in range(num_dims)]
    type_number, offset = reader.uint32(what), reader.uint64(what)
    try:
        ggml_type = GGMLType(type_number)
    except ValueError:
        known = ", ".join(kind.name for kind in GGMLType)
        raise UnsupportedModelError(
            f"{path}: tensor '{name}' has the unknown type number {type_number} (known: {known})"
        ) from None
    block_numbers, block_bytes = BLOCK_SIZES[ggml_type]
    if dims[0] % block_numbers or 0 in dims:
        raise CheckpointError(
            f"{path}: tensor '{name}' has dimensions {dims}, but {ggml_type.name} rows must be multiples of "
            f"{block_numbers}"
        )
    if offset % alignment:
        raise CheckpointError(
            f"{path}: tensor '{name}' lies at {offset}, which is not aligned to {alignment} bytes"
        )
    num_bytes = dims[0] // block_numbers * block_bytes
    for size in dims[1:]:
        num_bytes *= size
    return GGUFTensor(name, tuple(reversed(dims)), ggml_type, offset, num_bytes)


def _check_places(reader: HeaderReader, tensors: Mapping[str, GGUFTensor]) -> None:
    """Every tensor must end inside the file and none may overlap another."""
    before: GGUFTensor | None = None
    for entry in sorted(tensors.values(), key=lambda entry: entry.offset):
        end = entry.offset + entry.num_bytes
        if end > reader.num_bytes:
            raise CheckpointError(
                f"{reader.path}: tensor '{entry.name}' ends at byte {end}, but the file has {reader.num_bytes}; "
                "it was cut off: copy or download it again"
            )
        if before is not None and before.offset + before.num_bytes > entry.offset:
            raise CheckpointError(f"{reader.path}: tensors '{before.name}' and '{entry.name}' overlap")
        before = entry


__all__ = ["GGUFFile", "GGUFStrings", "GGUFTensor", "GGUFValue"]
