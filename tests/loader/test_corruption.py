"""Damaged files give a CheckpointError or load (a flipped bit in a weight is not seen), and never anything else."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as PackageType

from headrace.checkpoint.load import load_architecture
from headrace.checkpoint.source import ModelSource
from headrace.errors import CheckpointError
from headrace.loader.base import open_weights
from tests.loader.checkpoints import architecture, config, random_tensors, write_folder, write_gguf

NUM_TRIALS = 250
ARCH = architecture("llama")


@pytest.fixture(scope="module", params=["hf", "gguf"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("good")
    if request.param == "hf":
        return write_folder(folder / "model", config("llama"), random_tensors(ARCH))
    types = {"model.layers.0.mlp.up_proj.weight": PackageType.Q5_0, "lm_head.weight": PackageType.Q8_0}
    return write_gguf(folder / "model.gguf", ARCH, random_tensors(ARCH), types)


def weights_file(source: ModelSource) -> Path:
    return source.path if source.kind == "gguf" else source.path / "model.safetensors"


def copy_of(source: ModelSource, folder: Path) -> ModelSource:
    target = folder / source.path.name
    if source.kind == "gguf":
        shutil.copy(source.path, target)
    else:
        shutil.copytree(source.path, target)
    return ModelSource(source.kind, target, source.name)


def load(source: ModelSource) -> str | None:
    """Loads everything as the engine does; gives the error's text, or None."""
    try:
        weights = open_weights(source, load_architecture(source))
        for name in weights.names():
            weights.get(name).dequantize(torch.float32)
    except CheckpointError as error:
        return str(error)
    return None


def header_bytes(source: ModelSource, data: bytes) -> int:
    if source.kind == "hf":
        return 8 + int.from_bytes(data[:8], "little")
    return len(data) - sum(tensor.numel() * 4 for tensor in random_tensors(ARCH).values()) // 2


def test_every_truncation_is_an_error_that_names_the_file(source: ModelSource, tmp_path: Path) -> None:
    broken = copy_of(source, tmp_path)
    assert load(broken) is None
    path = weights_file(broken)
    data = path.read_bytes()
    generator = random.Random(1)
    header = header_bytes(source, data)
    cuts = [0, 1, 7, 8, 9, len(data) - 1] + [generator.randrange(header) for _ in range(40)]
    cuts += [generator.randrange(len(data)) for _ in range(40)]
    for cut in cuts:
        path.write_bytes(data[:cut])
        error = load(broken)
        assert error is not None and str(path) in error, cut


def test_flipped_bits_are_errors_or_unseen(source: ModelSource, tmp_path: Path) -> None:
    broken = copy_of(source, tmp_path)
    path = weights_file(broken)
    data = path.read_bytes()
    header = min(header_bytes(source, data), 8000)
    generator = random.Random(2)
    num_errors = 0
    for trial in range(NUM_TRIALS):
        damaged = bytearray(data)
        for _ in range(generator.choice((1, 1, 4))):
            place = generator.randrange(header if trial % 5 else len(data))
            damaged[place] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        error = load(broken)
        if error is not None:
            num_errors += 1
            assert str(broken.path) in error
    assert num_errors > NUM_TRIALS / 5


def test_bytes_of_another_file_are_no_model(source: ModelSource, tmp_path: Path) -> None:
    broken = copy_of(source, tmp_path)
    for data in (b"", b"\0" * 1000, b"PK\x03\x04" + bytes(1000), b"\x80\x04" + bytes(1000), b"{}" * 600):
        weights_file(broken).write_bytes(data)
        error = load(broken)
        assert error is not None and str(weights_file(broken)) in error
