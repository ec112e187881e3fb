"""FileReader: reads any place of a file; what the file has lost is an error, where a mapping would end the process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from headrace.checkpoint.file_stamp import FileStamp
from headrace.errors import CheckpointError

_MAX_READ_BYTES = 1 << 30
"""Systems read 2 GiB at once at most."""

_AHEAD_BYTES = 32 << 20
"""The disk is asked for so many bytes before they are read, so that it works while tensors are worked on."""


class FileReader:
    """Opens the file at the first read, and lets go of it when nobody holds this object any more.

    Args:
        stamp: what the file was when it was looked at, for errors.
        descriptor: of the file if it is open already; it belongs to this object from now on.
    """

    def __init__(self, path: Path, stamp: FileStamp, descriptor: int | None = None) -> None:
        self._path = path
        self._stamp = stamp
        self._descriptor = descriptor
        self._asked = (0, 0)

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def read_into(self, out: memoryview, begin: int) -> None:
        """Fill ``out`` (bytes) with what begins at byte ``begin``.

        Raises:
            CheckpointError: the file has lost these bytes, or cannot be read.
        """
        done, num_left = 0, 0
        while done < len(out):
            try:
                if self._descriptor is None:
                    self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                self._ask_ahead(self._descriptor, begin + done, begin + len(out))
                count = os.preadv(self._descriptor, [out[done : done + _MAX_READ_BYTES]], begin + done)
                if not count:
                    num_left = os.fstat(self._descriptor).st_size
            except OSError as error:
                raise CheckpointError(
                    f"{self._path}: cannot be read at byte {begin + done}: {error.strerror or error}"
                ) from error
            if not count:
                raise CheckpointError(
                    f"{self._path}: was changed while it was being read: bytes {begin} to {begin + len(out)} are "
                    f"needed, but of {self._stamp.num_bytes} bytes it has {num_left}; replace files by "
                    "renaming, not by writing into them"
                )
            done += count

    def _ask_ahead(self, descriptor: int, begin: int, end: int) -> None:
        first, last = self._asked if self._asked[0] <= begin <= self._asked[1] else (begin, begin)
        if end + _AHEAD_BYTES // 2 > last and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, last, end + _AHEAD_BYTES - last, os.POSIX_FADV_WILLNEED)
            self._asked = first, end + _AHEAD_BYTES
