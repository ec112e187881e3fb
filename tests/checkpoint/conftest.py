"""Fixtures of the checkpoint tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    """Writes bytes to a file and gives its path."""

    def write_file(data: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write_file
