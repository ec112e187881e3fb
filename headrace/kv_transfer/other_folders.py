"""OtherFolders: files of other models, weights, types and layouts in the directory of the disk tier.

They count towards the one bound of the directory. Those that no process uses leave first when there is no room, the
least recently used folder before others, and in it the least recently used file; those of a folder that a living
process holds are left to it. Whatever the engine has not written stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from headrace.kv_transfer.block_files import (
    BlockFile,
    block_name,
    is_digest,
    refuse_link,
    remove_plain,
    scan_folder,
)
from headrace.kv_transfer.folder_lock import SUFFIX, FolderLock

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Folder:
    path: Path
    is_held: bool
    blocks: list[BlockFile]  # the least recently used is the last
    num_bytes: int

    @property
    def used_at(self) -> int:
        return self.blocks[0].mtime_ns if self.blocks else 0


class OtherFolders:
    """All folders of a directory but one's own. Used by one thread.

    Args:
        root: the directory.
        own_name: of the folder that is not looked at.
    """

    def __init__(self, root: Path, own_name: str) -> None:
        self._root = root
        self._own_name = own_name
        self._folders: list[_Folder] = []
        self._said: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """Of their files, as far as it is known."""
        return sum(folder.num_bytes for folder in self._folders)

    def look(self) -> None:
        """See what is there now; empty folders, and what dead processes left half written, are removed.

        Raises OSError."""
        names, unknown = set(), []
        with os.scandir(self._root) as entries:
            for entry in entries:
                name = entry.name.removesuffix(SUFFIX)
                is_ours = is_digest(name) and (
                    entry.is_file(follow_symlinks=False)
                    if name != entry.name
                    else entry.is_dir(follow_symlinks=False)
                )
                if is_ours:
                    names.add(name)
                else:
                    unknown.append(entry.name)
        folders = [self._look_into(self._root / name, unknown) for name in names - {self._own_name}]
        self._folders = sorted(folders, key=lambda folder: folder.used_at)
        self.say_unknown(unknown)

    def room(self, max_bytes: int) -> int:
        """How many of the directory's bytes are for one's own files: what others that live leave, and at least an even
        share, to which they come down in turn."""
        held = [folder.num_bytes for folder in self._folders if folder.is_held]
        return max(max_bytes - sum(held), max_bytes // (1 + len(held)))

    def remove(self, num_bytes: int) -> None:
        """Remove so many bytes of files that nobody uses, or all of them."""
        for folder in self._folders:
            if num_bytes <= 0:
                return
            if folder.blocks and not folder.is_held:
                num_bytes -= self._remove_from(folder, num_bytes)

    def say_unknown(self, names: list[str]) -> None:
        """Tell of files that are not ours, once each."""
        new = sorted(set(names) - self._said)
        self._said.update(new)
        if new:
            shown = ", ".join(new[:3]) + (", …" if len(new) > 3 else "")
            logger.warning(
                "disk cache %s: %d files or folders were not written by headrace (%s); they stay, and do not count",
                self._root,
                len(new),
                shown,
            )

    def _look_into(self, path: Path, unknown: list[str]) -> _Folder:
        lock = FolderLock(path)
        is_held = not lock.take_alone()
        blocks: list[BlockFile] = []
        with contextlib.suppress(OSError):
            contents = scan_folder(path)
            blocks = contents.blocks[::-1]
            unknown += [f"{path.name}/{name}" for name in contents.unknown]
            if not is_held:
                for left in contents.left_over:
                    os.unlink(left)
        if not is_held and not blocks:
            _remove_empty(path, lock)
        lock.release()
        return _Folder(path, is_held, blocks, sum(block.num_bytes for block in blocks))

    def _remove_from(self, folder: _Folder, num_bytes: int) -> int:
        """The bytes that were removed: of a folder that is used by now, none."""
        lock = FolderLock(folder.path)
        if not lock.take_alone():
            folder.is_held = True
            return 0
        num_removed = 0
        try:
            refuse_link(folder.path)
            while folder.blocks and num_removed < num_bytes:
                remove_plain(folder.path / block_name(folder.blocks[-1].key))
                num_removed += folder.blocks.pop().num_bytes
            folder.num_bytes -= num_removed
        except OSError as error:
            logger.warning(
                "disk cache %s: files that nobody uses cannot be removed (%s), so disk_cache_bytes may be exceeded; "
                "remove the folder by hand",
                folder.path,
                error,
            )
            folder.blocks, folder.num_bytes = [], 0  # not tried again before the next look
        else:
            if not folder.blocks:
                _remove_empty(folder.path, lock)
        lock.release()
        return num_removed


def _remove_empty(folder: Path, lock: FolderLock) -> None:
    """A folder without blocks, and its lock, unless something else is in it."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        pass
    except OSError:
        return
    lock.remove()
