"""SafetensorsFile: the header of one .safetensors file, and its tensors as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

from headrace.checkpoint.file_stamp import FileStamp
from headrace.checkpoint.header_bytes import HeaderBytes
from headrace.errors import CheckpointError, UnsupportedModelError

MAX_HEADER_BYTES = 100_000_000

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "U8": 8,
        "I8": 8,
        "F8_E4M3": 8,
        "F8_E5M2": 8,
        "F8_E8M0": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "F64": 64,
        "I64": 64,
        "U64": 64,
        "C64": 64,
    }
)
"""Bits of one element, by the dtype names of the file format."""


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """Where one tensor lies: bytes ``begin`` to ``end`` of ``file``, counted from the file's first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class SafetensorsFile:
    """``entries`` by tensor name, and what the file was when its header was read."""

    stamp: FileStamp
    entries: Mapping[str, SafetensorsEntry]

    @classmethod
    def open(cls, path: str | Path) -> SafetensorsFile:
        """Reads the file's header and checks every entry.

        Raises:
            CheckpointError: the file is missing, cut or corrupt; the message names the file and the tensor.
        """
        path = Path(path)
        file = HeaderBytes(path, 8, "safetensors")
        header, data_start = _read_header(file)
        if not isinstance(header.pop("__metadata__", None) or {}, dict):
            raise CheckpointError(f"{path}: '__metadata__' in the header is not an object")
        entries = {name: _entry(path, name, item, data_start) for name, item in header.items()}
        _check_places(path, entries, data_start, file.num_bytes)
        return cls(file.stamp, MappingProxyType(entries))


def _read_header(file: HeaderBytes) -> tuple[dict[str, Any], int]:
    """The header's object and where the tensors' bytes start."""
    path, start = file.path, file.first(8)[:8]
    length = int.from_bytes(start, "little")
    if length > min(MAX_HEADER_BYTES, file.num_bytes - 8):
        if start[:7] == b"version":
            raise CheckpointError(f"{path}: is a Git LFS pointer, not the file itself; run 'git lfs pull'")
        raise CheckpointError(
            f"{path}: claims a header of {length} bytes, but only {file.num_bytes - 8} bytes follow (limit "
            f"{MAX_HEADER_BYTES}); it was cut off or is not a safetensors file"
        )
    try:
        header = json.loads(
            file.first(8 + length)[8 : 8 + length].decode(), object_pairs_hook=_without_duplicates
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    return header, 8 + length


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name '{next(name for name in names if names.count(name) > 1)}' is there twice")
    return result


def _entry(path: Path, name: str, item: Any, data_start: int) -> SafetensorsEntry:
    where = f"{path}: tensor '{name}'"
    if not isinstance(item, dict):
        raise CheckpointError(f"{where}: its header entry is not an object")
    dtype, shape, offsets = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise UnsupportedModelError(
            f"{where} has the unknown dtype {dtype!r} (known: {', '.join(DTYPE_BITS)})"
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has shape {shape!r} and data_offsets {offsets!r}, not lists of sizes")
    begin, end = offsets
    num_bits = prod(shape) * DTYPE_BITS[dtype]
    if num_bits % 8 or end - begin != num_bits // 8:
        raise CheckpointError(
            f"{where} ({dtype} {shape}) needs {num_bits / 8:g} bytes, but its data_offsets span {end - begin}"
        )
    return SafetensorsEntry(path, dtype, tuple(shape), data_start + begin, data_start + end)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 62 for item in value
    )


def _check_places(
    path: Path, entries: Mapping[str, SafetensorsEntry], data_start: int, num_bytes: int
) -> None:
    """The tensors must fill the file exactly: no overlap, no hole, no bytes past the end (the format's own rule)."""
    position, before = data_start, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > num_bytes:
            raise CheckpointError(
                f"{path}: tensor '{name}' ends at byte {entry.end}, but the file has {num_bytes}; it was cut off: "
                "copy or download it again"
            )
        if entry.begin < position:
            raise CheckpointError(f"{path}: tensors '{before}' and '{name}' overlap")
        if entry.begin > position:
            raise CheckpointError(f"{path}: {entry.begin - position} unused bytes before tensor '{name}'")
        position, before = entry.end, name
    if position != num_bytes:
        raise CheckpointError(f"{path}: {num_bytes - position} unused bytes after the last tensor '{before}'")
