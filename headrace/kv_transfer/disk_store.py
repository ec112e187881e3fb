"""DiskStore: a tier of files, one a block, that survives crashes and restarts.

A file is written under a temporary name and renamed when it is whole and on disk, so that a process or machine that
dies leaves nothing half written under a block's name. Each begins with a header::

    magic [8]  fingerprint [16]  key [16]  payload bytes uint64  crc32 of the payload uint32

and lies in a folder named for the fingerprint, which tells model, weights, types and layout apart: other models' files
are never looked at. A file that does not fit its header or its checksum is removed and its block computed again. Full
or read-only disks cost their blocks and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.errors import ConfigError
from headrace.kv_transfer.file_removal import FileRemoval
from headrace.kv_transfer.transfer import BlockTransfer

logger = logging.getLogger(__name__)

MAGIC = b"HRKV\x00\x01\r\n"
_HEADER = struct.Struct("<8s16s16sQI")
MAX_WAITING_WRITES = 64
"""Blocks waiting to be written; more are left out, so that a slow disk never holds up the engine."""

RETRY_S = 30.0
"""After a failed write none is tried for so long."""

MAX_WRITE_S = 3600.0
"""A file that still has a temporary name after so long was left behind."""

_CLOCK_SLACK_S = 5.0
"""A process that began later than this after a file was written did not write it."""

_HOST = hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
"""Processes are numbered by host, and containers that share a folder are hosts of their own."""


class DiskStore:
    """Blocks by key. ``write`` and ``clear`` return at once; one thread writes.

    Args:
        folder: made if need be; shared by all models.
        fingerprint: 16 bytes, of all that the meaning of a block's bytes depends on.
        block_bytes: bytes of a block.
        max_bytes: of all files of this fingerprint; the least recently used leave.

    Raises: ConfigError when ``max_bytes`` does not hold one block.
    """

    def __init__(self, folder: Path, fingerprint: bytes, block_bytes: int, max_bytes: int) -> None:
        self._file_bytes = _HEADER.size + block_bytes
        self._max_files = max_bytes // self._file_bytes
        if not self._max_files:
            raise ConfigError(
                f"disk_cache_bytes is {max_bytes}, less than one block's file of {self._file_bytes} bytes; raise it"
            )
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
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._scan()
        except OSError as error:
            self._complain("cannot be opened", error)
            self._quiet_until = time.monotonic() + RETRY_S
        self._make_room()

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
            logger.warning("cached block %s is damaged; it is removed and computed again", path)
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

    def shutdown(self) -> None:
        """Write what waits, then stop."""
        self._thread.shutdown(wait=True)

    def _scan(self) -> None:
        """Find what an earlier process left; what a crash left half written is removed."""
        found = []
        for entry in os.scandir(self._folder):
            key = _key_of(entry.name)
            with contextlib.suppress(OSError):
                status = entry.stat()
                if key is not None and status.st_size == self._file_bytes:
                    found.append((status.st_mtime_ns, key))
                elif key is not None or _is_left_over(entry.name, status.st_mtime):
                    os.unlink(entry.path)
        self._files = OrderedDict((key, None) for _, key in sorted(found))

    def _read(self, key: bytes, out: memoryview) -> bool:
        """Fill ``out``; whether the file is whole and what it should be. Raises OSError."""
        with self._path(key).open("rb") as file:
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
        if not self._folder.is_dir():
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
        """Write a whole file, then give it its name; False if all was cleared meanwhile. Raises OSError."""
        temporary = self._folder / f"{key.hex()}.{_HOST}-{os.getpid()}.tmp"
        try:
            with temporary.open("wb") as file:
                file.write(_HEADER.pack(*self._header(key, payload)))
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._path(key))
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        with self._lock:
            if epoch == self._epoch:
                self._files[key] = None
                self._doubted.discard(key)
                return True
        self._unlink_all([key])
        return False

    def _make_room(self) -> None:
        """Remove the least recently used of too many files."""
        while True:
            with self._lock:
                if len(self._files) <= self._max_files:
                    return
                key, _ = self._files.popitem(last=False)
                self._doubted.discard(key)
            try:
                self._path(key).unlink(missing_ok=True)
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
            logger.warning("disk cache %s was removed; blocks are computed and written again", self._folder)
        with self._lock:
            self._files.clear()
            self._doubted.clear()

    def _unlink_all(self, keys: list[bytes]) -> None:
        for key in keys:
            with contextlib.suppress(OSError):
                self._path(key).unlink(missing_ok=True)

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}.kv"

    def _complain(self, what: str, error: OSError, name: str = "") -> None:
        """Say it, each complaint once in a while."""
        now = time.monotonic()
        if now >= self._silent_until.get(what, 0.0):
            self._silent_until[what] = now + RETRY_S
            logger.warning(
                "disk cache %s %s: %s; blocks are computed instead", self._folder / name, what, error
            )


def _key_of(name: str) -> bytes | None:
    """The key in a file's name, or None if it is not a block's file."""
    stem, dot, suffix = name.partition(".")
    if dot + suffix != ".kv" or len(stem) != 32:
        return None
    try:
        return bytes.fromhex(stem)
    except ValueError:
        return None


def _is_left_over(name: str, written_at: float) -> bool:
    """Whether a file has a temporary name, and nobody is at it any more: its process is gone, or an hour went by."""
    stem, _, suffix = name.rpartition(".")
    if suffix != "tmp":
        return False
    host, _, process = stem.rpartition(".")[2].partition("-")
    is_gone = host == _HOST and process.isdecimal() and not _may_be_writing(int(process), written_at)
    return is_gone or time.time() - written_at > MAX_WRITE_S


def _may_be_writing(process: int, written_at: float) -> bool:
    """Whether the process that wrote at a time (seconds since the epoch) is still there.

    A container that starts again numbers its processes as before, and one without an init keeps dead ones as zombies.
    """
    try:
        os.kill(process, 0)
    except PermissionError:
        pass
    except (OSError, OverflowError):
        return False
    try:
        status = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(status[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # no Linux: whoever runs may be the one
        return True
    return status[0] != "Z" and time.time() - age_s < written_at + _CLOCK_SLACK_S
