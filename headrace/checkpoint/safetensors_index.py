"""SafetensorsIndex: every tensor of a Hugging Face folder, in one file or in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.checkpoint.file_stamp import FileStamp
from headrace.checkpoint.safetensors_file import SafetensorsEntry, SafetensorsFile
from headrace.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True, slots=True, eq=False)
class SafetensorsIndex:
    """Tensor name -> where it lies, over all files of a folder, and what each file was when its header was read."""

    folder: Path
    stamps: Mapping[str, FileStamp]
    entries: Mapping[str, SafetensorsEntry]

    @classmethod
    def open(cls, folder: str | Path) -> SafetensorsIndex:
        """Reads the headers of ``model.safetensors``, of the shards that the index names, or of all .safetensors.

        Raises:
            CheckpointError: no weights, only pickled ones (never loaded), a shard or a tensor that is missing, a
                corrupt file; the message names the file and the tensor.
        """
        folder = Path(folder)
        if (folder / INDEX_NAME).is_file():
            return _open_sharded(folder)
        paths = (
            [folder / SINGLE_NAME]
            if (folder / SINGLE_NAME).is_file()
            else sorted(folder.glob("*.safetensors"))
        )
        if not paths:
            raise CheckpointError(_why_no_weights(folder))
        stamps: dict[str, FileStamp] = {}
        entries: dict[str, SafetensorsEntry] = {}
        for path in paths:
            file = SafetensorsFile.open(path)
            stamps[str(path)] = file.stamp
            for name, entry in file.entries.items():
                if name in entries:
                    raise CheckpointError(
                        f"{path}: tensor '{name}' is also in {entries[name].file.name}, and there is no {INDEX_NAME}"
                    )
                entries[name] = entry
        return cls(folder, stamps, MappingProxyType(entries))


def _open_sharded(folder: Path) -> SafetensorsIndex:
    index_path = folder / INDEX_NAME
    weight_map = _read_weight_map(index_path)
    files: dict[Path, SafetensorsFile] = {}
    entries: dict[str, SafetensorsEntry] = {}
    for name, file_name in weight_map.items():
        path = folder / file_name
        if path not in files:
            if not path.is_file():
                missing = sorted({shard for shard in weight_map.values() if not (folder / shard).is_file()})
                raise CheckpointError(
                    f"{index_path}: {len(missing)} of {len(set(weight_map.values()))} shards are missing on disk: "
                    f"{', '.join(missing[:8])} (tensor '{name}' is in {file_name}); download them again"
                )
            files[path] = SafetensorsFile.open(path)
        found = files[path].entries.get(name)
        if found is None:
            raise CheckpointError(f"{path}: tensor '{name}' is missing, though {INDEX_NAME} says it is there")
        entries[name] = found
    stamps = {str(path): file.stamp for path, file in files.items()}
    return SafetensorsIndex(folder, stamps, MappingProxyType(entries))


def _read_weight_map(path: Path) -> dict[str, str]:
    try:
        index: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: key 'weight_map' is missing or not an object")
    for name, file_name in weight_map.items():
        # A shard lies beside its index; a path would reach out of the folder.
        if (
            not isinstance(file_name, str)
            or Path(file_name).name != file_name
            or not file_name.endswith(".safetensors")
        ):
            raise CheckpointError(
                f"{path}: tensor '{name}' is said to be in {file_name!r}, not a .safetensors file name"
            )
    return weight_map


def _why_no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: is not a folder"
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLE_SUFFIXES)
    if pickled:
        return (
            f"{folder}: has only pickled weights ({', '.join(pickled[:4])}), which can run code when they are loaded "
            "and are refused; convert them to safetensors"
        )
    return f"{folder}: has no .safetensors files; give a folder with weights, or load_format='dummy' for random ones"


__all__ = ["SafetensorsEntry", "SafetensorsFile", "SafetensorsIndex"]
