"""Files of blocks: what was written is read, and whatever else happens costs a block and nothing more."""

from __future__ import annotations

import errno
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.kv_transfer import block_files, disk_store
from headrace.kv_transfer.disk_store import DiskStore

BLOCK_BYTES = 4096
PRINT = bytes(range(16))


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def payload(number: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(BLOCK_BYTES))


def open_store(folder: Path, mark: bytes = PRINT, max_blocks: int = 1000) -> DiskStore:
    return DiskStore(folder, mark, BLOCK_BYTES, max_blocks * (BLOCK_BYTES + 52))


def write(store: DiskStore, number: int) -> bool:
    transfer = store.write(key(number), payload(number))
    end = time.monotonic() + 10
    while transfer is not None and not transfer.is_done and time.monotonic() < end:
        time.sleep(1e-3)
    return transfer is not None and transfer.num_done == 1


def read(store: DiskStore, number: int) -> bytes | None:
    out = memoryview(bytearray(BLOCK_BYTES))
    return bytes(out) if store.read(key(number), out) else None


def file_of(folder: Path, number: int) -> Path:
    return folder / PRINT.hex() / f"{key(number).hex()}.kv"


def test_blocks_outlive_the_store(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert all(write(store, number) for number in range(5))
    assert read(store, 3) == payload(3) and read(store, 9) is None
    store.shutdown()
    again = open_store(tmp_path)
    assert len(again) == 5 and key(4) in again and key(9) not in again
    assert [read(again, number) for number in range(5)] == [bytes(payload(number)) for number in range(5)]
    assert again.write(key(2), payload(2)) is None, "it is there already"
    again.clear()
    again.shutdown()
    assert len(again) == 0 and not list((tmp_path / PRINT.hex()).iterdir())


def test_the_least_recently_used_files_leave_also_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_blocks=3)
    for number in range(3):
        write(store, number)
        os.utime(file_of(tmp_path, number), (number, number))
    store.shutdown()
    again = open_store(tmp_path, max_blocks=3)
    assert read(again, 0) is not None
    write(again, 7)
    write(again, 8)
    again.shutdown()
    assert sorted(path.name for path in (tmp_path / PRINT.hex()).iterdir()) == [
        f"{key(number).hex()}.kv" for number in (0, 7, 8)
    ]


@pytest.mark.parametrize("place", [0, 20, 30, 45, 51, 52, 2000, BLOCK_BYTES + 51])
def test_a_flipped_byte_is_found(tmp_path: Path, place: int) -> None:
    store = open_store(tmp_path)
    write(store, 1)
    path = file_of(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)
    assert read(store, 1) is None and key(1) not in store and not path.exists()
    assert write(store, 1) and read(store, 1) == payload(1)
    store.shutdown()


@pytest.mark.parametrize("size", [0, 10, 52, BLOCK_BYTES, BLOCK_BYTES + 53])
def test_a_file_of_the_wrong_length_is_found_at_once_and_at_the_next_start(tmp_path: Path, size: int) -> None:
    store = open_store(tmp_path)
    for number in (1, 2):
        write(store, number)
        data = file_of(tmp_path, number).read_bytes()
        file_of(tmp_path, number).write_bytes((data + b"x")[:size])
    assert read(store, 1) is None
    store.shutdown()
    again = open_store(tmp_path)
    assert len(again) == 0 and not file_of(tmp_path, 2).exists()
    again.shutdown()


def test_other_models_and_older_layouts_are_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    write(store, 1)
    other = open_store(tmp_path, mark=bytes(16))
    assert key(1) not in other
    foreign = tmp_path / bytes(16).hex() / f"{key(1).hex()}.kv"
    foreign.write_bytes(file_of(tmp_path, 1).read_bytes())  # put there by hand
    again = open_store(tmp_path, mark=bytes(16))
    assert read(again, 1) is None
    monkeypatch.setattr(disk_store, "MAGIC", b"HRKV\x00\x02\r\n")
    assert read(store, 1) is None
    for each in (store, other, again):
        each.shutdown()


def test_a_full_disk_costs_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    assert write(store, 1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert not write(store, 2)
    assert key(2) not in store and not list((tmp_path / PRINT.hex()).glob("*.tmp"))
    assert store.write(key(3), payload(3)) is None, "the disk is left alone for a while"
    assert read(store, 1) == payload(1)
    store._quiet_until = 0.0
    assert write(store, 3)
    store.shutdown()


def test_a_disk_that_fills_up_in_mid_write_leaves_nothing_half_written(tmp_path: Path) -> None:
    """The system itself ends the write: files of this process may have half a block's bytes."""
    source = f"""
        import resource, time
        from pathlib import Path
        from headrace.kv_transfer.disk_store import DiskStore
        resource.setrlimit(resource.RLIMIT_FSIZE, ({BLOCK_BYTES // 2}, {BLOCK_BYTES // 2}))
        store = DiskStore(Path({str(tmp_path)!r}), {PRINT!r}, {BLOCK_BYTES}, 1 << 30)
        transfer = store.write(bytes(16), memoryview(bytes({BLOCK_BYTES})))
        store.shutdown()
        assert transfer.is_done and not transfer.num_done and bytes(16) not in store
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(source)], check=True, timeout=60)
    assert not list((tmp_path / PRINT.hex()).iterdir())


def test_a_read_only_folder_is_read_and_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    assert write(store, 1) and write(store, 2)
    store.shutdown()
    (tmp_path / PRINT.hex() / "left.99.tmp").write_bytes(b"half")
    file_of(tmp_path, 2).write_bytes(bytes(BLOCK_BYTES + 52))

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    opened = Path.open

    def open_to_read(path: Path, mode: str = "r", *args: object) -> object:
        return opened(path, mode, *args) if mode == "rb" else refuse()  # type: ignore[call-overload]

    for name in ("utime", "unlink", "rename", "replace"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(Path, "open", open_to_read)
    again = open_store(tmp_path)
    assert len(again) == 2 and read(again, 1) == payload(1)
    assert read(again, 2) is None and key(2) not in again, "damaged, though its file must stay"
    assert not write(again, 3) and key(3) not in again
    again.clear()
    again.shutdown()


def files_left(store: DiskStore) -> tuple[int, str]:
    end = time.monotonic() + 10
    while (left := store.files_left()) is None and time.monotonic() < end:
        time.sleep(1e-3)
    assert left is not None
    return left


def test_files_that_cannot_be_removed_are_told_of_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    assert store.files_left() == (0, "") and all(write(store, number) for number in range(3))

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        store.clear()
        assert files_left(store) == (3, "Read-only file system") and len(store) == 0
    (warning,) = caplog.records
    assert "3 of 3 files could not be removed (Read-only file system)" in warning.getMessage()
    again = open_store(tmp_path)
    assert len(again) == 3, "the next start finds them"
    again.shutdown()
    assert write(store, 1), "what is computed anew is written over"
    store.clear()
    assert files_left(store) == (0, "") and not list((tmp_path / PRINT.hex()).iterdir())
    store.shutdown()


def test_a_folder_that_cannot_be_written_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = open_store(tmp_path / "file")
    assert len(store) == 0 and not write(store, 1) and read(store, 1) is None
    store._quiet_until = 0.0
    assert not write(store, 1)
    store.clear()
    store.shutdown()


def test_a_kill_in_mid_write_leaves_whole_files_only(tmp_path: Path) -> None:
    source = f"""
        import random
        from pathlib import Path
        from headrace.kv_transfer.disk_store import DiskStore
        store = DiskStore(Path({str(tmp_path)!r}), {PRINT!r}, {BLOCK_BYTES}, 1 << 30)
        number = 0
        while True:
            store.write(number.to_bytes(16, "big"), memoryview(random.Random(number).randbytes({BLOCK_BYTES})))
            number += 1
    """
    writer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)])
    end = time.monotonic() + 60
    while len(list(tmp_path.glob("*/*.kv"))) < 20 and time.monotonic() < end:
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    left = tmp_path / PRINT.hex() / f"{key(1 << 40).hex()}.{block_files.HOST}-{writer.pid}.tmp"
    left.write_bytes(b"half")
    store = open_store(tmp_path, max_blocks=1 << 20)
    assert len(store) >= 20 and not list(tmp_path.glob("*/*.tmp"))
    for number in [int.from_bytes(name, "big") for name in list(store._files)]:
        assert read(store, number) == payload(number)
    store.shutdown()


def test_a_store_too_small_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disk_cache_bytes"):
        DiskStore(tmp_path, PRINT, BLOCK_BYTES, BLOCK_BYTES)


def test_what_was_found_at_the_start_makes_room_too(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(9):
        write(store, number)
        os.utime(file_of(tmp_path, number), (number, number))
    store.shutdown()
    again = open_store(tmp_path, max_blocks=4)
    assert len(again) == 4 and [key(number) in again for number in (4, 5)] == [False, True]
    assert len(list((tmp_path / PRINT.hex()).iterdir())) == 4
    again.shutdown()


@pytest.mark.parametrize("is_read_first", [False, True])
def test_a_folder_that_is_removed_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_read_first: bool
) -> None:
    store = open_store(tmp_path)
    assert write(store, 1) and write(store, 2)
    shutil.rmtree(tmp_path)
    if is_read_first:
        assert read(store, 1) is None and len(store) == 0, "neither is there"
    assert write(store, 3) and read(store, 3) == payload(3)
    assert len(store) == 1 and "was removed" in caplog.text
    assert write(store, 2) and read(store, 2) == payload(2)
    store.shutdown()


def test_a_file_that_is_gone_is_forgotten_and_the_disk_not_blamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    assert write(store, 1) and write(store, 2)
    file_of(tmp_path, 1).unlink()
    assert read(store, 1) is None and key(1) not in store and len(store) == 1
    assert write(store, 1) and not caplog.text
    store.shutdown()


def test_a_failed_read_stops_no_writes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert write(store, 1)
    file_of(tmp_path, 1).unlink()
    file_of(tmp_path, 1).mkdir()  # reading it is an error, and not that it is missing
    assert read(store, 1) is None
    assert write(store, 2)
    store.shutdown()


def test_doubted_blocks_are_written_again_if_they_are_damaged(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(4):
        write(store, number)
    sound, damaged, lost = (file_of(tmp_path, number) for number in (1, 2, 3))
    os.utime(sound, (1, 1))
    damaged.write_bytes(bytes(BLOCK_BYTES + 52))
    lost.unlink()
    assert not any(write(store, number) for number in range(4)), "they are thought to be there"
    store.doubt([key(number) for number in (1, 2, 3, 9)])
    assert len(store) == 4 and key(9) not in store
    assert all(write(store, number) for number in (1, 2, 3)) and not write(store, 0)
    assert sound.stat().st_mtime == 1, "it was left as it is"
    assert [read(store, number) for number in range(4)] == [bytes(payload(number)) for number in range(4)]
    assert not any(write(store, number) for number in range(4)), "no doubt is left"
    store.shutdown()


def test_files_that_another_process_writes_are_left_to_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.shutdown()
    folder, block = tmp_path / PRINT.hex(), key(5).hex()
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ours, others, old, notes = (
        folder / name
        for name in (
            f"{block}.{block_files.HOST}-{sleeper.pid}.tmp",
            f"{block}.00000000-{1 << 22}.tmp",
            f"{block}.99.tmp",
            "notes.txt",
        )
    )
    for path in (ours, others, old, notes):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    open_store(tmp_path).shutdown()
    assert sorted(folder.iterdir()) == sorted([ours, others, notes])
    sleeper.communicate()
    open_store(tmp_path).shutdown()
    assert sorted(folder.iterdir()) == sorted([others, notes])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_a_number_that_is_a_zombies_or_of_another_process_by_now_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_files, "MAX_WRITE_S", math.inf)
    store = open_store(tmp_path)
    store.shutdown()
    ended = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert ended.stdout is not None and ended.stdout.read() == b""
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody took note
    zombies, again, mine = (
        tmp_path / PRINT.hex() / f"{key(number).hex()}.{block_files.HOST}-{process}.tmp"
        for number, process in ((1, ended.pid), (2, os.getpid()), (3, os.getpid()))
    )
    for path in (zombies, again, mine):
        path.write_bytes(b"half")
    os.utime(again, (1, 1))  # before this process began
    open_store(tmp_path).shutdown()
    ended.wait()
    assert mine.exists() and not zombies.exists() and not again.exists()


def test_what_is_written_while_all_is_cleared_is_gone_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    fsync = os.fsync

    def clear_meanwhile(descriptor: int) -> None:
        store.clear()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", clear_meanwhile)
    assert not write(store, 1)
    store.shutdown()
    assert len(store) == 0 and not list((tmp_path / PRINT.hex()).iterdir())


def test_what_somebody_else_put_in_a_blocks_place_stays_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe was waited for without end, and a folder stopped all writes for a while."""
    elsewhere = tmp_path / "elsewhere"
    store = open_store(tmp_path / "cache")
    folder = tmp_path / "cache" / PRINT.hex()
    paths = [file_of(tmp_path / "cache", number) for number in range(3)]
    assert all(write(store, number) for number in range(3))
    elsewhere.write_bytes(paths[1].read_bytes())
    for path in paths:
        path.unlink()
    os.mkfifo(paths[0])
    paths[1].symlink_to(elsewhere)
    paths[2].mkdir()
    assert [read(store, number) for number in range(3)] == [None] * 3 and len(store) == 0
    assert not any(write(store, number) for number in range(3))
    assert write(store, 3) and read(store, 3) == payload(3)
    store.clear()
    assert files_left(store) == (0, "")
    assert sorted(folder.iterdir()) == paths and paths[1].is_symlink() and elsewhere.exists()
    store.shutdown()
    assert len(caplog.records) == 1, "each kind of complaint is made once in a while"


def test_a_link_in_the_folders_place_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_store, "RETRY_S", 0.0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for number in range(3):
        (elsewhere / file_of(tmp_path, number).name).write_bytes(b"of somebody else")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / PRINT.hex()).symlink_to(elsewhere)
    store = open_store(tmp_path / "cache", max_blocks=1)
    assert not any(write(store, number) for number in range(5)) and len(store) == 0
    store.clear()
    assert files_left(store) == (0, "")
    store.shutdown()
    assert len(list(elsewhere.iterdir())) == 3 and "is a link, which is not followed" in caplog.text


def test_clearing_takes_what_another_engine_has_written(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    assert write(first, 1) and write(second, 2)
    first.clear()
    assert files_left(first) == (0, "") and not list((tmp_path / PRINT.hex()).iterdir())
    assert read(second, 2) is None and write(second, 2)
    first.shutdown()
    second.shutdown()


def test_many_damaged_files_and_a_folder_that_is_removed_again_and_again_flood_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    for number in range(5):
        assert write(store, number)
        file_of(tmp_path, number).write_bytes(b"damaged")
        assert read(store, number) is None
    for number in range(5):
        assert write(store, number)
        shutil.rmtree(tmp_path)
    store.shutdown()
    assert len(caplog.records) == 2, "each kind of complaint is made once in a while"
