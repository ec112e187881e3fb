"""A model file mapped into memory, and whether it is still what it was when it was opened."""

from __future__ import annotations

import mmap
import os
import stat
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
        """Raises CheckpointError when the file is not what it was: its header would not fit what is read. And to touch
        bytes that a mapped file has lost ends the process (SIGBUS), which nothing in it can turn into an error."""
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


def open_mapped(path: Path, min_bytes: int, kind: str) -> tuple[mmap.mmap, FileStamp]:
    """The whole file, for reading.

    Args:
        min_bytes: that the kind of file has at least; kind: its name, for errors.

    Raises: CheckpointError for what cannot be read, is no regular file, or is too short.
    """
    try:
        # A pipe would be waited for without O_NONBLOCK; for regular files it means nothing.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: is not a regular file; copy the weights there")
            if status.st_size < min_bytes:
                raise CheckpointError(
                    f"{path}: has {status.st_size} bytes, too few for a {kind} file; copy it again"
                )
            return mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ), FileStamp.of(status)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
