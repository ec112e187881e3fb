"""Files that are no files, too short, or changed after they were opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.checkpoint import header_bytes
from headrace.checkpoint.file_stamp import FileStamp
from headrace.checkpoint.gguf_file import GGUFFile, GGUFStrings
from headrace.checkpoint.gguf_header import HeaderReader
from headrace.checkpoint.header_bytes import HeaderBytes
from headrace.checkpoint.safetensors_file import SafetensorsFile
from headrace.errors import CheckpointError
from tests.checkpoint.gguf_writer import TINY_TENSORS, gguf_bytes, tiny_llama


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
    stamp = HeaderBytes(path, 8, "made-up").stamp
    assert stamp == FileStamp.of(path.stat())
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
        HeaderBytes(path, 8, "made-up")


def test_a_header_is_read_as_far_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_bytes, "_FIRST_BYTES", 10)
    path = tmp_path / "model"
    path.write_bytes(bytes(range(100)))
    file = HeaderBytes(path, 8, "made-up")
    assert [file.first(end)[:end] for end in (4, 11, 90)] == [bytes(range(end)) for end in (4, 11, 90)]
    assert file.first(1 << 62) == bytes(range(100))


@pytest.mark.parametrize("num_left", [0, 30])
def test_a_header_that_is_cut_while_it_is_read_is_an_error(
    num_left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped, it ended the process."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(tiny_llama(), TINY_TENSORS))
    monkeypatch.setattr(header_bytes, "_FIRST_BYTES", 16)
    take = HeaderReader.take

    def take_and_cut(self: HeaderReader, num_bytes: int, what: str) -> bytes:
        os.truncate(path, num_left)
        return take(self, num_bytes, what)

    whole = GGUFFile.open(path)
    monkeypatch.setattr(HeaderReader, "take", take_and_cut)
    with pytest.raises(CheckpointError, match=rf"model\.gguf: was changed .* it has {num_left}"):
        GGUFFile.open(path)
    tokens = whole.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GGUFStrings) and len(tokens.to_list()) == len(tokens), "text is decoded later"
