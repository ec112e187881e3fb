"""Tokenizers that many tests share: they are read once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.checkpoint import resolve_model
from headrace.checkpoint.gguf_file import GGUFFile
from headrace.errors import CheckpointError
from headrace.tokenizer import Tokenizer
from headrace.tokenizer.gguf import load_gguf_tokenizer
from tests.checkpoint.gguf_writer import gguf_bytes


def packaged_gguf(name: str) -> GGUFFile:
    try:
        return GGUFFile.open(resolve_model(name).path)
    except CheckpointError:
        pytest.skip(f"the package of {name} is not installed")


@pytest.fixture(scope="session")
def smollm2_file() -> GGUFFile:
    return packaged_gguf("smollm2")


@pytest.fixture(scope="session")
def smollm2(smollm2_file: GGUFFile) -> Tokenizer:
    return load_gguf_tokenizer(smollm2_file)


@pytest.fixture(scope="session")
def gemma_file() -> GGUFFile:
    return packaged_gguf("gemma3-270m")


@pytest.fixture(scope="session")
def gemma(gemma_file: GGUFFile) -> Tokenizer:
    return load_gguf_tokenizer(gemma_file)


@pytest.fixture
def from_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Builds a tokenizer from GGUF metadata, with a cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def build(metadata: dict[str, object]) -> Tokenizer:
        path = tmp_path / "t.gguf"
        path.write_bytes(gguf_bytes(metadata))
        return load_gguf_tokenizer(GGUFFile.open(path))

    return build
