"""DiskStore: a tier of files, one a block, that survives crashes and restarts.

A file is written under a temporary name and renamed when it is whole and on disk, so that a process or machine that
dies leaves nothing half written under a block's name. Each begins with a header::

    magic [8]  fingerprint [16]  key [16]  payload bytes uint64  crc32 of the payload uint32

and lies in a folder named for the fingerprint, which tells model, weights, types and layout apart: other models' files
are never opened, but they count towards the bound and leave first (``other_folders``). A file that does not fit its
header or its checksum is removed and its block computed again. Full or read-only disks cost their blocks and nothing
else.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.errors import ConfigError
from headrace.kv_transfer.block_files import (
    block_name,
    is_foreign,
    open_plain,
    refuse_link,
    remove_plain,
    scan_folder,
    temporary_name,
)
from headrace.kv_transfer.file_removal import FileRemoval
from headrace.kv_transfer.folder_lock import FolderLock
from headrace.kv_transfer.other_folders import OtherFolders
from headrace.kv_transfer.transfer import BlockTransfer

logger = logging.getLogger(__name__)

MAGIC = b"HRKV\x00\x01\r\n"
_HEADER = struct.Struct("<8s16s16sQI")
MAX_WAITING_WRITES = 64
"""Blocks waiting to be written; more are left out, so that a slow disk never holds up the engine."""

RETRY_S = 30.0
"""After a failed write none is tried for so long."""

LOOK_S = 30.0
"""While blocks are written, what other processes did to the directory is looked at so often."""


class DiskStore:
    """Blocks by key. ``write`` and ``clear`` return at once; one thread writes.

    Args:
        folder: made if need be; shared by all models.
        fingerprint: 16 bytes, of all that the meaning of a block's bytes depends on.
        block_bytes: bytes of a block.
        max_bytes: of all blocks' files under ``folder``; those of fingerprints that no process uses leave first, then
            the least recently used of this one.

    Raises: ConfigError when ``max_bytes`` does not hold one block.
    """

    def __init__(self, folder: Path, fingerprint: bytes, block_bytes: int, max_bytes: int) -> None:
        self._file_bytes = _HEADER.size + block_bytes
        if max_bytes < self._file_bytes:
            raise ConfigError(
                f"disk_cache_bytes is {max_bytes}, less than one block's file of {self._file_bytes} bytes; raise it"
            )
        self._max_bytes = max_bytes
        self._folder = folder / fingerprint.hex()
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._files: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._doubted: set[bytes] = (
            set()
        )  # of them, those whose file is looked at before it stands for a write
        self._num_waiting = 0
        self._epoch = 0  # rises with each clearing: what waits to be written is not
        self._quiet_until = 0.0
        self._silent_until: dict[str, float] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-disk")
        self._removal = FileRemoval(self._folder, self._thread)
        self._use = FolderLock(self._folder)
        self._others = OtherFolders(folder, self._folder.name)
        self._look_at = math.inf  # until the first look has begun
        try:
            self._use.hold()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files = OrderedDict.fromkeys(self._scan())
        except OSError as error:
            self._complain("cannot be opened", error)
            self._quiet_until = time.monotonic() + RETRY_S
        self._make_room()
        self._thread.submit(self._look_around)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, key: object) -> bool:
        return key in self._files

    def read(self, key: bytes, out: memoryview) -> bool:
        """Fill ``out`` [block_bytes] with a block; False, and the file is gone, if it is not what it should be."""
        path = self._path(key)
        try:
            is_good = self._read(key, out)
        except FileNotFoundError:  # another process made room, or a person
            self._forget_lost(key)
            return False
        except OSError as error:
            self._complain("cannot be read", error, path.name)
            self._forget(key)
            return False
        if not is_good:
            self._warn("damaged", f"cached block {path} is damaged; it is removed and computed again")
            self._forget(key)
            return False
        with self._lock:
            self._doubted.discard(key)
            if key in self._files:
                self._files.move_to_end(key)
        with contextlib.suppress(OSError):
            os.utime(path)  # the order of use survives a restart
        return True

    def write(self, key: bytes, payload: memoryview) -> BlockTransfer | None:
        """Begin to write a block, whose bytes must stay until it is done; None if it is not written."""
        with self._lock:
            if (
                (key in self._files and key not in self._doubted)
                or self._num_waiting >= MAX_WAITING_WRITES
                or time.monotonic() < self._quiet_until
            ):
                return None
            self._num_waiting += 1
        transfer = BlockTransfer()
        self._thread.submit(self._write, key, payload, transfer, self._epoch)
        return transfer

    def tend(self) -> None:
        """Called often: an engine that writes nothing gives room to others, too. Returns at once."""
        if self._files and time.monotonic() >= self._look_at:
            self._look_at = math.inf  # until the look has begun
            self._thread.submit(self._look_around)

    def doubt(self, keys: Iterable[bytes]) -> None:
        """These may be damaged, as their neighbour was: a write of one looks at its file, and makes it anew."""
        with self._lock:
            self._doubted.update(key for key in keys if key in self._files)

    def clear(self) -> None:
        """Remove all files of this fingerprint."""
        with self._lock:
            keys = list(self._files)
            self._files.clear()
            self._doubted.clear()
            self._epoch += 1
        self._removal.begin(self._path(key) for key in keys)

    def files_left(self) -> tuple[int, str] | None:
        """See ``DiskBlocks``."""
        return self._removal.files_left()

    def num_bytes(self) -> int:
        """See ``DiskBlocks``."""
        return len(self._files) * self._file_bytes + self._others.num_bytes

    def shutdown(self) -> None:
        """Write what waits, then stop."""
        self._thread.shutdown(wait=True)
        self._use.release()

    def _scan(self) -> list[bytes]:
        """Blocks that are there, the least recently used first; what a crash left half written is removed."""
        contents = scan_folder(self._folder)
        is_whole = {block.key: block.num_bytes == self._file_bytes for block in contents.blocks}
        for path in contents.left_over:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._unlink_all([key for key in is_whole if not is_whole[key]])
        self._others.say_unknown([f"{self._folder.name}/{name}" for name in contents.unknown])
        return [key for key in is_whole if is_whole[key]]

    def _look_around(self) -> None:
        """See what is in the directory beside this folder, and make room."""
        self._look_at = time.monotonic() + LOOK_S
        try:
            self._use.hold()
            self._others.look()
        except OSError as error:
            self._complain("cannot be looked at", error)
        self._make_room()

    def _take_in(self, epoch: int) -> None:
        """What other processes wrote to this folder or removed from it. Raises OSError."""
        keys = self._scan()
        with self._lock:
            if epoch == self._epoch:
                for key in self._files.keys() - set(keys):
                    del self._files[key]
                    self._doubted.discard(key)
                for key in keys:
                    self._files.setdefault(key)

    def _read(self, key: bytes, out: memoryview) -> bool:
        """Fill ``out``; whether the file is whole and what it should be. Raises OSError."""
        with open(self._path(key), "rb", opener=open_plain) as file:
            header = file.read(_HEADER.size)
            if file.readinto(out) != self._block_bytes or file.read(1) or len(header) != _HEADER.size:
                return False
        return _HEADER.unpack(header) == self._header(key, out)

    def _header(self, key: bytes, payload: memoryview) -> tuple[bytes, bytes, bytes, int, int]:
        return MAGIC, self._fingerprint, key, self._block_bytes, zlib.crc32(payload)

    def _write(self, key: bytes, payload: memoryview, transfer: BlockTransfer, epoch: int) -> None:
        start = time.perf_counter()
        num_done = 0
        try:
            if epoch == self._epoch:
                self._make_folder()
                num_done = int(self._is_there(key) or self._put(key, payload, epoch))
                if time.monotonic() >= self._look_at:
                    self._take_in(epoch)
                    self._look_around()
                self._make_room()
        except FileNotFoundError:
            self._forget_lost(key)  # the folder was removed just now: the next write makes it
        except OSError as error:
            self._complain("cannot be written", error)
            self._quiet_until = time.monotonic() + RETRY_S
        finally:
            with self._lock:
                self._num_waiting -= 1
            transfer.finish(num_done, 1e3 * (time.perf_counter() - start))

    def _make_folder(self) -> None:
        """Again, if somebody removed it; the files are gone with it. Raises OSError."""
        refuse_link(self._folder)
        if not self._folder.is_dir():
            self._use.hold()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._forget_all()

    def _is_there(self, key: bytes) -> bool:
        """Whether a block that was doubted is in its file after all."""
        if key not in self._doubted:
            return False
        with contextlib.suppress(OSError):
            if self._read(key, memoryview(bytearray(self._block_bytes))):
                self._doubted.discard(key)
                return True
        return False

    def _put(self, key: bytes, payload: memoryview, epoch: int) -> bool:
        """Write a whole file, then give it its name; False if all was cleared meanwhile, or something else has that
        name. Raises OSError."""
        if is_foreign(self._path(key)):
            return False
        temporary = self._folder / temporary_name(key)
        try:
            with open(temporary, "wb", opener=open_plain) as file:
                file.write(_HEADER.pack(*self._header(key, payload)))
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._path(key))
        except OSError:
            with contextlib.suppress(OSError):
                remove_plain(temporary)
            raise
        with self._lock:
            if epoch == self._epoch:
                self._files[key] = None
                self._doubted.discard(key)
                return True
        self._unlink_all([key])
        return False

    def _make_room(self) -> None:
        """Remove files that no process uses, then the least recently used of too many."""
        self._others.remove(self.num_bytes() - self._max_bytes)
        max_files = max(1, self._others.room(self._max_bytes) // self._file_bytes)
        while True:
            with self._lock:
                if len(self._files) <= max_files:
                    return
                key, _ = self._files.popitem(last=False)
                self._doubted.discard(key)
            try:
                remove_plain(self._path(key))
            except OSError as error:
                self._complain("holds more than disk_cache_bytes, and a file cannot be removed", error)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._files.pop(key, None)
            self._doubted.discard(key)
        self._unlink_all([key])

    def _forget_lost(self, key: bytes) -> None:
        """Of a file that was not found: it, or all of them if the folder is gone."""
        if self._folder.is_dir():
            self._forget(key)
        else:
            self._forget_all()

    def _forget_all(self) -> None:
        if self._files:
            self._warn(
                "removed", f"disk cache {self._folder} was removed; blocks are computed and written again"
            )
        with self._lock:
            self._files.clear()
            self._doubted.clear()

    def _unlink_all(self, keys: list[bytes]) -> None:
        for key in keys:
            with contextlib.suppress(OSError):
                remove_plain(self._path(key))

    def _path(self, key: bytes) -> Path:
        return self._folder / block_name(key)

    def _complain(self, what: str, error: OSError, name: str = "") -> None:
        self._warn(what, f"disk cache {self._folder / name} {what}: {error}; blocks are computed instead")

    def _warn(self, what: str, text: str) -> None:
        """Each kind of complaint once in a while."""
        now = time.monotonic()
        if now >= self._silent_until.get(what, 0.0):
            self._silent_until[what] = now + RETRY_S
            logger.warning("%s", text)
