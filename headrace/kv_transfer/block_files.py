"""What the files in a folder of the disk tier are, by their names; others were put there by somebody else."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import socket
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

MAX_WRITE_S = 3600.0
"""A file that still has a temporary name after so long was left behind."""

_CLOCK_SLACK_S = 5.0
"""A process that began later than this after a file was written did not write it."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
_BLOCK = re.compile(r"([0-9a-f]{32})\.kv")
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.(?:([0-9a-f]{8})-)?([0-9]{1,10})\.tmp")

HOST = hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
"""Processes are numbered by host, and containers that share a folder are hosts of their own."""


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A block's file. Those that were used last are the largest."""

    mtime_ns: int
    num_bytes: int
    key: bytes


@dataclass(slots=True)
class FolderContents:
    """Files of blocks, paths of what dead processes left half written, and names that are not ours."""

    blocks: list[BlockFile] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def is_digest(name: str) -> bool:
    """Whether a folder may be named so: 16 bytes in hexadecimal digits."""
    return _DIGEST.fullmatch(name) is not None


def block_name(key: bytes) -> str:
    """The name of a block's file."""
    return f"{key.hex()}.kv"


def temporary_name(key: bytes) -> str:
    """Its name while this process writes it."""
    return f"{key.hex()}.{HOST}-{os.getpid()}.tmp"


def refuse_link(folder: Path) -> None:
    """Raises OSError when a folder is a link: what is behind it is somebody else's."""
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "is a link, which is not followed", str(folder))


def is_foreign(path: str | Path) -> bool:
    """Whether a folder, a link or a pipe has the name of a file of ours."""
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def open_plain(path: str | Path, flags: int) -> int:
    """An opener for files of ours: neither follows a link nor waits for a pipe. Raises OSError."""
    _refuse_foreign(path)
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def remove_plain(path: Path) -> None:
    """Remove a file of ours, if it is there. Raises OSError, also for what else has its name, which stays."""
    _refuse_foreign(path)
    path.unlink(missing_ok=True)


def scan_folder(folder: Path) -> FolderContents:
    """What is in a folder; nothing is followed or opened. Raises OSError."""
    refuse_link(folder)
    contents = FolderContents()
    with os.scandir(folder) as entries:
        for entry in entries:
            block, temporary = _BLOCK.fullmatch(entry.name), _TEMPORARY.fullmatch(entry.name)
            with contextlib.suppress(OSError):  # it is gone by now
                if not (block or temporary) or not entry.is_file(follow_symlinks=False):
                    contents.unknown.append(entry.name)
                    continue
                status = entry.stat(follow_symlinks=False)
                if block:
                    key = bytes.fromhex(block[1])
                    contents.blocks.append(BlockFile(status.st_mtime_ns, status.st_size, key))
                elif temporary and _is_left_over(temporary[1], int(temporary[2]), status.st_mtime):
                    contents.left_over.append(entry.path)
    contents.blocks.sort(key=lambda block: (block.mtime_ns, block.key))
    return contents


def _is_left_over(host: str | None, process: int, written_at: float) -> bool:
    """Whether nobody is at a file with a temporary name any more: its process is gone, or an hour went by."""
    is_gone = host == HOST and not _may_be_writing(process, written_at)
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


def _refuse_foreign(path: str | Path) -> None:
    if is_foreign(path):
        raise FileExistsError(errno.EEXIST, "is no plain file", str(path))
