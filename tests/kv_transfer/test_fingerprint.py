"""Models are told apart by their files: names, sizes, times, and contents, of which samples are read."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from headrace.kv_transfer import fingerprint as module
from headrace.kv_transfer.fingerprint import fingerprint


def test_files_and_settings(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    first = fingerprint(tmp_path, ("float32", 16))
    assert first == fingerprint(tmp_path, ("float32", 16)) and len(first) == 16
    assert first != fingerprint(tmp_path, ("float32", 32))
    (tmp_path / "notes.txt").write_text("no part of the model")
    assert first == fingerprint(tmp_path, ("float32", 16))
    os.utime(file, (1, 1))
    assert first != fingerprint(tmp_path, ("float32", 16))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.gguf", "MODEL.GGUF"])
@pytest.mark.parametrize("place", [0, 9, -1])
@pytest.mark.parametrize("size", [10, 300_000, 3 << 20])
def test_equal_names_sizes_and_times_do_not_make_models_equal(
    tmp_path: Path, name: str, place: int, size: int
) -> None:
    marks = []
    for change in (0, 1):
        data = bytearray(size)
        data[place] ^= change
        path = tmp_path / str(change) / name
        path.parent.mkdir()
        path.write_bytes(data)
        os.utime(path, (1, 1))
        marks += [fingerprint(path.parent, ()), fingerprint(path, ())]
    assert len(set(marks[:2])) == 1, "the same files, by their folder or by name"
    assert marks[0] != marks[2] and marks[1] != marks[3]


@pytest.mark.parametrize("size", [module.HEAD_BYTES + 1, 9 << 20, (1 << 30) + 7])
def test_samples_reach_from_end_to_end_and_every_large_matrix(size: int) -> None:
    offsets = list(module._piece_offsets(size))
    assert len(offsets) >= 64 and offsets[0] == 0 and offsets[-1] == size - module.PIECE_BYTES
    gaps = [later - earlier for earlier, later in itertools.pairwise(offsets)]
    assert max(gaps) <= 1.1 * module.PIECE_DISTANCE
    assert sum(module.PIECE_BYTES for _ in offsets) <= max(size // 1000, 64 * module.PIECE_BYTES)


def test_what_cannot_be_read_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "lost.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.json").mkdir()
    assert len(fingerprint(tmp_path, ())) == 16
