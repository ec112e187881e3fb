"""HeaderBytes: what a model file begins with. It is read, not mapped: to touch bytes that a mapped file has lost ends
the process (SIGBUS), which nothing in it can turn into an error."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from headrace.checkpoint.file_reader import FileReader
from headrace.checkpoint.file_stamp import FileStamp
from headrace.errors import CheckpointError

_FIRST_BYTES = 256 << 10
"""Read at first; then twice as much, and so on, until a header whose length nothing tells is there."""


class HeaderBytes:
    """Opens a file and reads of it what is asked for.

    Args:
        min_bytes: that the kind of file has at least; kind: its name, for errors.

    Attributes:
        num_bytes: of the file.
        stamp: what it was when it was opened.

    Raises: CheckpointError for what cannot be read, is no regular file, or is too short.
    """

    def __init__(self, path: Path, min_bytes: int, kind: str) -> None:
        try:
            # A pipe would be waited for without O_NONBLOCK; for regular files it means nothing.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error
        status = os.fstat(descriptor)
        self.path, self.num_bytes, self.stamp = path, status.st_size, FileStamp.of(status)
        self._file = FileReader(path, self.stamp, descriptor)
        self._data = b""
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: is not a regular file; copy the weights there")
        if self.num_bytes < min_bytes:
            raise CheckpointError(
                f"{path}: has {self.num_bytes} bytes, too few for a {kind} file; copy it again"
            )

    def first(self, num_bytes: int) -> bytes:
        """So many bytes from the file's begin, or more; fewer only if it had fewer when it was opened.

        Raises: CheckpointError when it has lost them since.
        """
        num_read = len(self._data)
        if num_read < min(num_bytes, self.num_bytes):
            end = min(max(num_bytes, 2 * num_read, _FIRST_BYTES), self.num_bytes)
            more = bytearray(end - num_read)
            self._file.read_into(memoryview(more), num_read)
            self._data += more
        return self._data
