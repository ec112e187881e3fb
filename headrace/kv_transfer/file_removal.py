"""FileRemoval: removes many files beside other work, and knows which of them stayed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from headrace.kv_transfer.block_files import block_name, remove_plain, scan_folder

logger = logging.getLogger(__name__)


class FileRemoval:
    """Files of one folder that are to go. ``begin`` returns at once; what stays is tried again by the next.

    Args:
        thread: does the work; one that does one thing after another, so that no file written later is removed.
    """

    def __init__(self, folder: Path, thread: ThreadPoolExecutor) -> None:
        self._folder = folder
        self._thread = thread
        self._left: set[Path] = set()
        self._latest: Future[tuple[int, str]] | None = None

    def begin(self, paths: Iterable[Path]) -> None:
        """Remove these, and what other processes have written there."""
        self._latest = self._thread.submit(self._remove, set(paths))

    def files_left(self) -> tuple[int, str] | None:
        """(files that could not be removed, why the first could not); None while the removal goes on."""
        if self._latest is None:
            return 0, ""
        return self._latest.result() if self._latest.done() else None

    def _remove(self, paths: set[Path]) -> tuple[int, str]:
        paths |= self._left
        with contextlib.suppress(OSError):
            paths |= {self._folder / block_name(block.key) for block in scan_folder(self._folder).blocks}
        self._left = set()
        reason = ""
        for path in sorted(paths):
            try:
                remove_plain(path)
            except OSError as error:
                self._left.add(path)
                reason = reason or error.strerror or str(error)
        if self._left:
            logger.warning(
                "disk cache %s: %d of %d files could not be removed (%s): the next start finds them again; make the "
                "folder writable and reset the cache again, or remove them by hand",
                self._folder,
                len(self._left),
                len(paths),
                reason,
            )
        return len(self._left), reason
