"""FolderLock: tells that a process uses a folder of the disk tier; it ends with the process, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

SUFFIX = ".lock"
_PATIENCE_S = 2.0
"""How long somebody who removes files of the folder is waited for; then it is used without a lock."""


class FolderLock:
    """A lock on the file beside a folder: shared by all who use it, or of the one who removes it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder.with_name(folder.name + SUFFIX)
        self._descriptor: int | None = None

    def __del__(self) -> None:
        self.release()

    def hold(self) -> bool:
        """Share the folder, anew if its lock's file was removed; False if that cannot be had: others may then think
        that nobody uses it, which costs its files and nothing else."""
        if self._descriptor is not None and self._is_of_path(self._descriptor):
            return True
        self.release()
        end = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            while not self._take(fcntl.LOCK_SH) and time.monotonic() < end:
                time.sleep(0.02)
        return self._descriptor is not None

    def take_alone(self) -> bool:
        """Nobody uses the folder, and nobody will until ``release``; False if somebody does, or nobody can tell."""
        with contextlib.suppress(OSError):
            return self._take(fcntl.LOCK_EX)
        return False

    def remove(self) -> None:
        """The folder is gone: remove the lock's file, too. Only after ``take_alone``."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def release(self) -> None:
        """Let others have the folder."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _take(self, kind: int) -> bool:
        """Whether the lock could be had at once. Raises OSError where there are no locks."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o666)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            if self._is_of_path(descriptor):
                self._descriptor, descriptor = descriptor, -1
        except BlockingIOError:
            pass
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return self._descriptor is not None

    def _is_of_path(self, descriptor: int) -> bool:
        """Whether it is that of the file there, which another process may have removed."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path, follow_symlinks=False))
        except OSError:
            return False
