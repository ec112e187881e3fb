"""What is read of a file does not stay in memory beside the weights that were made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.checkpoint.load import ModelSource
from headrace.loader.file_bytes import map_file, tensor_at
from headrace.loader.tensor_names import is_norm
from tests.loader.checkpoints import (
    architecture,
    config,
    open_source,
    random_tensors,
    write_folder,
    write_gguf,
)


def test_small_tensors_are_copies_and_large_ones_views(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * (3 << 13))
    file = map_file(path)
    small, large = (tensor_at(file, 8, 8 + count, torch.uint8, (count,)) for count in (1 << 20, 4 << 20))
    assert small.untyped_storage().nbytes() == len(small) and torch.equal(small, file[8 : 8 + len(small)])
    assert large.data_ptr() == file.data_ptr() + 8


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list mappings")
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_built_model_has_let_go_of_its_files(kind: str, tmp_path: Path) -> None:
    weights = open_source(_write(kind, tmp_path))
    before = _num_mappings(tmp_path)
    norms = {
        name: weights.get(name).dequantize(torch.float32, "cpu") for name in weights.names() if is_norm(name)
    }
    assert norms and _num_mappings(tmp_path) > before
    weights.finish()
    assert _num_mappings(tmp_path) == before
    for name, norm in norms.items():  # a late reader finds them still
        assert torch.equal(weights.get(name).dequantize(torch.float32, "cpu"), norm)


def _write(kind: str, folder: Path) -> ModelSource:
    arch = architecture("llama")
    tensors = random_tensors(arch)
    if kind == "gguf":
        return write_gguf(folder / "m.gguf", arch, tensors)
    return write_folder(folder, config("llama"), tensors)


def _num_mappings(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())
