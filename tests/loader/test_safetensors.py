from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.checkpoint.safetensors_file import SafetensorsFile
from headrace.checkpoint.safetensors_index import SafetensorsIndex
from headrace.errors import CheckpointError, UnsupportedModelError
from headrace.loader.base import open_weights
from headrace.loader.safetensors import SafetensorsSource
from headrace.loader.tensor_names import expected_tensors, is_norm
from tests.loader.checkpoints import CONFIGS, architecture, config, open_source, random_tensors, write_folder

ARCH = architecture("llama")


def source_of(folder: Path, tensors: dict[str, Tensor]) -> SafetensorsSource:
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsSource.open(folder, ARCH)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_comes_back_as_written(name: str, tmp_path: Path) -> None:
    arch = architecture(name)
    tensors = random_tensors(arch, dtype=torch.bfloat16)
    weights = open_source(write_folder(tmp_path, config(name), tensors))
    assert set(weights.names()) == set(tensors) == set(expected_tensors(arch))
    for key, tensor in tensors.items():
        expected = tensor.float() + 1 if name == "gemma3" and is_norm(key) else tensor
        assert torch.equal(weights.get(key).dequantize(torch.float32), expected.float())
    assert weights.unused_names() == []


WEIGHTS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
NO_WEIGHTS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8]
NO_WEIGHTS += [torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", [*WEIGHTS, *NO_WEIGHTS])
def test_dtypes_are_kept_and_codes_without_scales_are_no_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = (torch.randn(5, 6) * 50).to(dtype)
    weights = source_of(tmp_path, {"first": torch.zeros(3, dtype=torch.uint8), "x": stored})
    data = weights.get("x")
    assert data.tensor is not None and data.tensor.dtype == dtype
    assert torch.equal(data.tensor.view(torch.uint8), stored.view(torch.uint8))
    if dtype in WEIGHTS:
        assert torch.equal(data.dequantize(torch.float32), stored.float())
    else:
        with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'x' is stored as"):
            data.dequantize(torch.float32)


@pytest.mark.parametrize(
    "index", [(slice(2, 5),), (slice(None), slice(3, 7)), (slice(4, 9), slice(0, 1)), (slice(9, 9),)]
)
def test_slices_equal_the_same_slice_of_the_whole(index: tuple[slice, ...], tmp_path: Path) -> None:
    tensor = torch.randn(9, 8)
    weights = source_of(tmp_path, {"x": tensor})
    part = weights.get("x", index).dequantize(torch.float32)
    assert torch.equal(part, tensor[index])
    assert weights.bytes_read == tensor[index].numel() * 4


def test_what_is_handed_out_is_memory_of_its_own(tmp_path: Path) -> None:
    tensor = torch.randn(1 << 16, 8)
    weights = source_of(tmp_path, {"x": tensor})
    out = torch.empty_like(tensor)
    data = weights.get("x", out=out)
    assert data.tensor is out and torch.equal(out, tensor)
    data.dequantize_into(out)
    weights.get("x").dequantize(torch.float32).zero_()
    assert torch.equal(weights.get("x").dequantize(torch.float32), tensor)


def test_misaligned_tensors_are_read(tmp_path: Path) -> None:
    """The format asks writers to align, readers must live with those that do not."""
    numbers = torch.randn(4, 3)
    header = json.dumps({"x": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}}).encode()
    header += b" " * ((5 - len(header)) % 8)
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + numbers.numpy().tobytes())
    weights = SafetensorsSource.open(tmp_path, ARCH)
    assert torch.equal(weights.get("x", (slice(1, 3),)).dequantize(torch.float32), numbers[1:3])


def test_shards_are_joined_and_errors_name_the_shard(tmp_path: Path) -> None:
    tensors = random_tensors(ARCH)
    names = list(tensors)
    files = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "config.json").write_text(json.dumps(config("llama")))
    weights = SafetensorsSource(SafetensorsIndex.open(tmp_path), ARCH)
    for name in names:
        assert torch.equal(weights.get(name).dequantize(torch.float32), tensors[name])
        with pytest.raises(CheckpointError, match=rf"{files[name]}: tensor '{name}' has shape"):
            weights.get(name, shape=(1, 2, 3))


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("model."),
        lambda name: f"language_model.{name}",
        lambda name: name.replace("model.", "model.language_model.", 1),
    ],
    ids=["bare", "outer prefix", "inner prefix"],
)
def test_other_spellings_of_the_names(rename: Callable[[str], str], tmp_path: Path) -> None:
    arch = architecture("gemma3", tie_word_embeddings=False)
    tensors = random_tensors(arch)
    stored = {rename(name): tensor for name, tensor in tensors.items()}
    stored["vision_tower.patch.weight"] = torch.zeros(1)
    source = write_folder(tmp_path, config("gemma3", tie_word_embeddings=False), stored)
    weights = open_weights(source, arch)
    for name in tensors:
        weights.get(name)
    assert weights.unused_names() == []


def test_unsupported_dtype_names_tensor_and_file(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors: tensor 'x' has dtype F4"):
        SafetensorsSource.open(tmp_path, ARCH).get("x")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytest_model.bin").write_bytes(b"")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match="pickled"):
        SafetensorsSource.open(tmp_path, ARCH)


def test_a_pipe_in_place_of_the_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe: is not a regular file"):
        SafetensorsFile.open(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        SafetensorsFile.open(tmp_path)
