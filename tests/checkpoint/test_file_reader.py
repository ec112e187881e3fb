"""What is read of a file is there, or an error."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headrace.checkpoint import file_reader
from headrace.checkpoint.file_reader import FileReader
from headrace.checkpoint.file_stamp import FileStamp
from headrace.errors import CheckpointError


def read(file: FileReader, begin: int, end: int) -> bytes:
    out = bytearray(end - begin)
    file.read_into(memoryview(out), begin)
    return bytes(out)


def test_all_bytes_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    path.write_bytes(bytes(range(100)))
    file = FileReader(path, FileStamp.of(path.stat()))
    monkeypatch.setattr(file_reader, "_MAX_READ_BYTES", 7)
    assert read(file, 3, 50) == bytes(range(3, 50)) and read(file, 100, 100) == b""
    os.truncate(path, 60)
    assert read(file, 10, 60) == bytes(range(10, 60))
    with pytest.raises(
        CheckpointError, match=r"model: was changed .* bytes 40 to 61 .* of 100 bytes it has 60"
    ):
        read(file, 40, 61)

    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match="model: cannot be read at byte 40: Input/output error"):
        read(file, 40, 41)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone: cannot be read at byte 4: No such file"):
        read(FileReader(tmp_path / "gone", FileStamp(8, 0)), 4, 8)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the system does not list open files")
def test_a_file_that_nobody_holds_is_closed(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(bytes(100))
    before = len(os.listdir("/proc/self/fd"))
    file = FileReader(tmp_path / "model", FileStamp(100, 0))
    assert read(file, 0, 1) == b"\0" and len(os.listdir("/proc/self/fd")) == before + 1
    del file
    assert len(os.listdir("/proc/self/fd")) == before
