"""What the bytes of a cached block depend on, as one digest: blocks of anything else are never read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

FORMAT = "1: [layers, K/V, heads, tokens, dim]; keys are rotated"
"""Changes with the meaning of a block's bytes."""

_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".json")


def fingerprint(model_path: Path, settings: Iterable[object]) -> bytes:
    """16 bytes of the model's files (names, sizes and times of change; contents take too long) and of ``settings``.

    Args:
        model_path: the model's folder or file.
        settings: whatever else decides what K and V are: types, layout, architecture.
    """
    digest = hashlib.blake2b(FORMAT.encode(), digest_size=16)
    files = sorted(model_path.iterdir()) if model_path.is_dir() else [model_path]
    for file in files:
        if file.suffix in _WEIGHT_SUFFIXES:
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    for setting in settings:
        digest.update(f"{setting!r}\n".encode())
    return digest.digest()
