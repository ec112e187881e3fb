"""FileStamp: whether a model file is still what it was when it was opened."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells that a file was written to or replaced: its size in bytes and when it last changed.

    Its number on the disk is left out: some network file systems give a new one at each look.
    """

    num_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        """Of what ``os.stat`` or ``os.fstat`` has found."""
        return cls(status.st_size, status.st_mtime_ns)

    def check(self, path: str | Path) -> None:
        """Raises CheckpointError when the file is not what it was: its header would not fit what is read."""
        try:
            now = FileStamp.of(os.stat(path))
        except OSError as error:
            raise CheckpointError(
                f"{path}: is gone since it was opened: {error.strerror or error}"
            ) from error
        if now != self:
            raise CheckpointError(
                f"{path}: was changed while it was being read: it had {self.num_bytes} bytes and has {now.num_bytes}; "
                "load it when it is complete, and replace files by renaming, not by writing into them"
            )
