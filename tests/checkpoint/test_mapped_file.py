"""Files that are no files, too short, or changed after they were opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.checkpoint.gguf_file import GGUFFile
from headrace.checkpoint.mapped_file import FileStamp, open_mapped
from headrace.checkpoint.safetensors_file import SafetensorsFile
from headrace.errors import CheckpointError


@pytest.mark.parametrize("open_file", [GGUFFile.open, SafetensorsFile.open])
def test_a_pipe_is_refused_without_waiting(open_file: object, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe: is not a regular file"):
        open_file(tmp_path / "pipe")  # type: ignore[operator]
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        open_file(tmp_path / "nothing")  # type: ignore[operator]


@pytest.mark.parametrize("open_file", [GGUFFile.open, SafetensorsFile.open])
def test_a_folder_in_its_place_is_told_and_does_not_stay_open(open_file: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a regular file"):
        open_file(tmp_path)  # type: ignore[operator]
    descriptors = Path("/proc/self/fd")
    if descriptors.is_dir():
        assert tmp_path not in [each.resolve() for each in descriptors.iterdir()]


def test_what_was_changed_is_told_with_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(bytes(100))
    data, stamp = open_mapped(path, 8, "made-up")
    assert len(data) == 100 and stamp == FileStamp.of(path.stat())
    stamp.check(path)
    os.truncate(path, 60)
    with pytest.raises(CheckpointError, match=r"model: was changed while .* it had 100 bytes and has 60"):
        stamp.check(path)
    path.write_bytes(bytes(100))
    os.utime(path, ns=(0, stamp.mtime_ns + 1_000_000))
    with pytest.raises(CheckpointError, match="was changed"):
        stamp.check(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="model: is gone since it was opened"):
        stamp.check(path)
    path.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="has 5 bytes, too few for a made-up file"):
        open_mapped(path, 8, "made-up")
