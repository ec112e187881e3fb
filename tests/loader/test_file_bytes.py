"""Parts of files in memory of their own: whatever becomes of a file, what was read stays, what is lost is told."""

from __future__ import annotations

import os
import subprocess
import sys
from math import prod
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from headrace.checkpoint.file_stamp import FileStamp
from headrace.checkpoint.source import ModelSource, resolve_model
from headrace.loader.base import WeightSource
from headrace.loader.file_bytes import TensorFiles
from headrace.loader.tensor_names import is_norm
from tests.loader.checkpoints import (
    architecture,
    config,
    open_source,
    random_tensors,
    write_folder,
    write_gguf,
)

PARTS = {
    "whole": (slice(0, 6), slice(0, 4096)),
    "rows": (slice(2, 5), slice(0, 4096)),
    "long pieces of rows": (slice(1, 4), slice(1000, 3100)),
    "short pieces of rows": (slice(1, 4), slice(4000, 4010)),
    "nothing": (slice(3, 3), slice(0, 4096)),
    "no columns": (slice(0, 6), slice(7, 7)),
}


def files(path: Path) -> TensorFiles:
    return TensorFiles({str(path): FileStamp.of(path.stat())})


@pytest.mark.parametrize("dtype", [torch.int16, torch.float32, torch.uint8, torch.bool])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_that_of_the_whole(part: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path, index = tmp_path / "data", PARTS[part]
    whole = torch.randint(0, 2, (6, 4096)).to(dtype)
    path.write_bytes(b"before" + whole.view(torch.uint8).numpy().tobytes() + b"after")
    read = files(path).read(str(path), 6, dtype, (6, 4096), index)
    assert read.dtype == dtype and torch.equal(read, whole[index])
    out = torch.ones_like(whole[index])
    again = files(path).read(str(path), 6, dtype, (6, 4096), index, out)
    assert torch.equal(again, read)
    is_cut = again.shape[1] * dtype.itemsize < 4096  # from whole rows
    assert (again is out) == (not is_cut), "read to where it stays"


def test_what_cannot_be_read_straight_to_its_place_leaves_it_alone(tmp_path: Path) -> None:
    path, index = tmp_path / "data", (slice(0, 4), slice(0, 4))
    path.write_bytes(torch.arange(16, dtype=torch.int32).numpy().tobytes())
    places = [torch.ones(4, 4), torch.ones(4, 4, dtype=torch.int32).t(), torch.ones(4, 5, dtype=torch.int32)]
    for out in places:
        read = files(path).read(str(path), 0, torch.int32, (4, 4), index, out)
        assert read.flatten().tolist() == list(range(16)) and bool((out == 1).all())


@pytest.mark.parametrize("shape", [(), (5,), (0,), (3, 4, 5), (2, 0, 3)])
def test_tensors_of_any_rank(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "data"
    whole = torch.arange(prod(shape), dtype=torch.int32).view(shape)
    path.write_bytes(whole.numpy().tobytes())
    index = tuple(slice(0, size) for size in shape)
    assert torch.equal(files(path).read(str(path), 0, torch.int32, shape, index), whole)
    cut = tuple(slice(size // 2, size) for size in shape)
    assert torch.equal(
        files(path).read(str(path), 0, torch.int32, shape, cut), whole[cut] if shape else whole
    )


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_file_that_is_cut_while_tensors_are_copied_ends_no_process(kind: str, tmp_path: Path) -> None:
    """In a process of its own: what touches lost bytes of a mapped file is ended by SIGBUS."""
    source = _write(kind, tmp_path)
    file = source.path if kind == "gguf" else source.path / "model.safetensors"
    script = f"""
        import os
        from headrace.checkpoint.file_stamp import FileStamp
        from headrace.errors import CheckpointError
        from tests.loader.test_file_bytes import _open

        weights, check = _open({kind!r}, {str(tmp_path)!r}), FileStamp.check
        name = next(name for name in weights.names() if "embed_tokens" in name)
        data, whole = weights.get(name), os.stat({str(file)!r}).st_size

        def cut_after_the_check(stamp, path):
            check(stamp, path)
            os.truncate(path, 4096)

        FileStamp.check = cut_after_the_check
        try:
            weights.get(name)
        except CheckpointError as error:
            assert {str(file)!r} in str(error) and f"of {{whole}} bytes it has 4096" in str(error), error
            print("told", float(data.tensor.float().sum()))
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("told"), (done.returncode, done.stderr[-2000:])


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="the system does not list mappings and files"
)
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_built_model_has_let_go_of_its_files(kind: str, tmp_path: Path) -> None:
    weights = open_source(_write(kind, tmp_path))
    before = _num_open(tmp_path)
    norms = {
        name: weights.get(name).dequantize(torch.float32, "cpu") for name in weights.names() if is_norm(name)
    }
    assert norms and _num_open(tmp_path) > before
    weights.finish()
    assert _num_open(tmp_path) == before
    for name, norm in norms.items():  # a late reader finds them still
        assert torch.equal(weights.get(name).dequantize(torch.float32, "cpu"), norm)


def _write(kind: str, folder: Path) -> ModelSource:
    """A model whose embedding has 2 MiB."""
    arch = architecture("llama", vocab_size=8192)
    tensors = random_tensors(arch)
    if kind == "gguf":
        return write_gguf(folder / "m.gguf", arch, tensors)
    return write_folder(folder, config("llama", vocab_size=8192), tensors)


def _open(kind: str, folder: str) -> WeightSource:
    return open_source(resolve_model(str(Path(folder) / "m.gguf") if kind == "gguf" else folder))


def _num_open(folder: Path) -> int:
    """Files in the folder that are mapped or open."""
    mapped = sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())
    files = Path("/proc/self/fd")
    opened = [os.readlink(files / name) for name in os.listdir(files) if (files / name).is_symlink()]
    return mapped + sum(path.startswith(str(folder)) for path in opened)
