"""What the bytes of a cached block depend on, as one digest: blocks of anything else are never read."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

FORMAT = "2: [layers, K/V, heads, tokens, dim]; keys are rotated"
"""Changes with the meaning of a block's bytes."""

MIN_PIECES = 64
PIECE_BYTES = 4 << 10
PIECE_DISTANCE = 4 << 20
"""Large files have a piece in each 4 MiB, a thousandth of them: every matrix that is as large has one."""
HEAD_BYTES = 1 << 20
"""Read whole: headers, which say what the rest means."""

_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".json")


def fingerprint(model_path: Path, settings: Iterable[object]) -> bytes:
    """16 bytes of the model's files and of ``settings``.

    Of each file: name, size, time of change, and samples of its contents, since images and package stores give all
    files one time. To read everything would take as long as to load it.

    Args:
        model_path: the model's folder or file.
        settings: whatever else decides what K and V are: types, layout, architecture.
    """
    digest = hashlib.blake2b(FORMAT.encode(), digest_size=16)
    files = sorted(model_path.iterdir()) if model_path.is_dir() else [model_path]
    for file in files:
        if file == model_path or (file.suffix.lower() in _WEIGHT_SUFFIXES and file.is_file()):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
            digest.update(_digest_of_samples(file, status.st_size))
    for setting in settings:
        digest.update(f"{setting!r}\n".encode())
    return digest.digest()


def _digest_of_samples(file: Path, size: int) -> bytes:
    """16 bytes; a file that cannot be read (none that the model needs) counts as empty."""
    digest = hashlib.blake2b(digest_size=16)
    with contextlib.suppress(OSError), file.open("rb", buffering=0) as opened:
        digest.update(opened.read(HEAD_BYTES))
        for offset in _piece_offsets(size):
            opened.seek(offset)
            digest.update(opened.read(PIECE_BYTES))
    return digest.digest()


def _piece_offsets(size: int) -> Iterator[int]:
    """Where pieces begin, at even distances; the last one ends with the file."""
    if size > HEAD_BYTES:
        last, count = size - PIECE_BYTES, max(MIN_PIECES, size // PIECE_DISTANCE)
        yield from (last * number // (count - 1) for number in range(count))
