"""What Triton's cache on disk does not know: it takes a kernel for the same if its own text and its constants print
alike, but a constant's methods, which say sizes, layouts and PTX, may have changed since."""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest_of(*paths: str) -> str:
    """Of the files' contents, for a field of a constant whose methods are there."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:16]
