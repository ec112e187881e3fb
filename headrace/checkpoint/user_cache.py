"""The user's cache directory: files that can be made again, kept to start faster."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def user_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/headrace``, else ``~/.cache/headrace``; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "headrace"


@contextmanager
def atomic_writer(target: Path) -> Iterator[BinaryIO]:
    """A new file that takes ``target``'s place when the block ends, and vanishes when it raises.

    Readers and other processes see the old file or the whole new one, never a part.

    Raises:
        OSError: the directory cannot be written or the disk is full.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
