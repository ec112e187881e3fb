"""One bound for all files of a directory: what nobody uses leaves first, what somebody uses or wrote stays."""

from __future__ import annotations

import fcntl
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from headrace.kv_transfer import block_files, disk_store
from headrace.kv_transfer.disk_store import DiskStore
from tests.kv_transfer.test_disk_store import BLOCK_BYTES, PRINT, key, open_store, payload, read, write

FILE_BYTES = BLOCK_BYTES + 52
OLD, OLDER = b"\1" * 16, b"\2" * 16


def fill(root: Path, mark: bytes, numbers: range, used_at: float) -> None:
    """Blocks of another model, whose engine has ended. The n-th was used n seconds after ``used_at``."""
    store = open_store(root, mark)
    for number in numbers:
        assert write(store, number)
        os.utime(root / mark.hex() / block_files.block_name(key(number)), (used_at + number,) * 2)
    store.shutdown()


def settle(store: DiskStore) -> None:
    """Let what the store does by itself end."""
    store._thread.submit(lambda: None).result(10)


def names(root: Path, mark: bytes) -> list[int]:
    folder = root / mark.hex()
    found = folder.iterdir() if folder.is_dir() else []
    return sorted(int(path.stem, 16) for path in found if path.suffix == ".kv")


def total(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_what_nobody_uses_leaves_first_least_recently_used_folder_before_others(tmp_path: Path) -> None:
    fill(tmp_path, OLD, range(3), 2000)
    fill(tmp_path, OLDER, range(3), 1000)
    store = open_store(tmp_path, max_blocks=6)
    settle(store)
    assert total(tmp_path) == 6 * FILE_BYTES, "there is room, so nothing leaves"
    seen = []
    for number in range(8):
        assert write(store, number)
        seen.append((names(tmp_path, OLDER), names(tmp_path, OLD), names(tmp_path, PRINT)))
        assert store.num_bytes() == total(tmp_path) <= 6 * FILE_BYTES
    assert seen[:3] == [([1, 2], [0, 1, 2], [0]), ([2], [0, 1, 2], [0, 1]), ([], [0, 1, 2], [0, 1, 2])]
    assert seen[3:6] == [([], [1, 2], [0, 1, 2, 3]), ([], [2], [0, 1, 2, 3, 4]), ([], [], [0, 1, 2, 3, 4, 5])]
    assert seen[6:] == [([], [], [1, 2, 3, 4, 5, 6]), ([], [], [2, 3, 4, 5, 6, 7])]
    store.shutdown()
    left = [path.name for path in tmp_path.iterdir()]
    assert sorted(left) == sorted([PRINT.hex(), f"{PRINT.hex()}.lock"]), (
        "nothing is left of the other folders"
    )


def test_too_much_of_other_models_leaves_at_the_start(tmp_path: Path) -> None:
    fill(tmp_path, OLD, range(5), 2000)
    fill(tmp_path, OLDER, range(5), 1000)
    fill(tmp_path, PRINT, range(2), 500)
    store = open_store(tmp_path, max_blocks=4)
    settle(store)
    assert (names(tmp_path, OLDER), names(tmp_path, OLD), names(tmp_path, PRINT)) == ([], [3, 4], [0, 1])
    assert read(store, 0) == payload(0)
    store.shutdown()
    again = open_store(tmp_path, OLD)
    settle(again)
    assert read(again, 3) == payload(3) and read(again, 0) is None, "what stayed is used as before"
    again.shutdown()


@pytest.fixture
def other_engine(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that uses the folder of OLD, with three blocks."""
    source = f"""
        import sys
        from pathlib import Path
        from tests.kv_transfer.test_disk_store import open_store, write
        store = open_store(Path({str(tmp_path)!r}), {OLD!r})
        assert all(write(store, number) for number in range(3))
        print("ready", flush=True)
        sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", dedent(source)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def test_a_folder_is_held_as_long_as_its_process_lives_however_that_ends(
    tmp_path: Path, other_engine: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_store, "LOOK_S", 0.0)
    store = open_store(tmp_path, max_blocks=4)
    settle(store)
    for number in range(4):
        assert write(store, number)
    assert names(tmp_path, OLD) == [0, 1, 2] and names(tmp_path, PRINT) == [2, 3], "an even share at least"
    other_engine.send_signal(signal.SIGKILL)
    other_engine.wait(10)
    for number in range(4, 7):
        assert write(store, number)
        assert total(tmp_path) <= 4 * FILE_BYTES
    assert names(tmp_path, OLD) == [] and names(tmp_path, PRINT) == [3, 4, 5, 6]
    store.shutdown()


def test_a_folder_that_is_taken_into_use_since_the_last_look_stays(tmp_path: Path) -> None:
    fill(tmp_path, OLD, range(3), 1000)
    store = open_store(tmp_path, max_blocks=4)
    settle(store)
    other = open_store(tmp_path, OLD)
    for number in range(4):
        assert write(store, number)
    assert names(tmp_path, OLD) == [0, 1, 2]
    assert [read(other, number) for number in range(3)] == [payload(number) for number in range(3)]
    other.shutdown()
    store.shutdown()


def test_engines_that_live_at_the_same_time_come_to_an_even_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_store, "LOOK_S", 0.0)
    first, second = open_store(tmp_path, OLD, max_blocks=8), open_store(tmp_path, PRINT, max_blocks=8)
    for number in range(10):
        write(first, number)
    assert names(tmp_path, OLD) == list(range(2, 10)), "all of it while the other has nothing"
    for number in range(10):
        write(second, number)
        write(first, 100 + number)
    assert len(names(tmp_path, OLD)) == len(names(tmp_path, PRINT)) == 4
    first.shutdown()
    second.shutdown()


def test_an_engine_that_writes_nothing_gives_room_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_store, "LOOK_S", 0.0)
    idle, busy = open_store(tmp_path, OLD, max_blocks=8), open_store(tmp_path, PRINT, max_blocks=8)
    assert all(write(idle, number) for number in range(8))
    assert all(write(busy, number) for number in range(8))
    assert total(tmp_path) == 12 * FILE_BYTES, "until it looks"
    idle.tend()
    settle(idle)
    assert names(tmp_path, OLD) == [4, 5, 6, 7] and total(tmp_path) == 8 * FILE_BYTES
    idle.shutdown()
    busy.shutdown()


def test_engines_of_one_model_share_the_bound_and_see_each_others_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_store, "LOOK_S", 0.0)
    first, second = open_store(tmp_path, max_blocks=6), open_store(tmp_path, max_blocks=6)
    for number in range(5):
        assert write(first, number)
    assert write(second, 10)
    assert len(second) == 6 and read(second, 4) == payload(4)
    for number in range(11, 20):
        assert write(second, number) and total(tmp_path) <= 6 * FILE_BYTES
    assert write(first, 20)
    assert key(19) in first and key(0) not in first and total(tmp_path) <= 6 * FILE_BYTES
    first.shutdown()
    second.shutdown()


def test_what_the_engine_did_not_write_stays_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_store, "LOOK_S", 0.0)
    fill(tmp_path, OLD, range(3), 1000)
    elsewhere = tmp_path.with_name(tmp_path.name + "-elsewhere")
    shutil.copytree(tmp_path / OLD.hex(), elsewhere)
    (tmp_path / OLDER.hex()).symlink_to(elsewhere)
    (tmp_path / f"{OLDER.hex()}.lock").touch()  # of the folder that was there
    strange = [
        tmp_path / "notes.txt",
        tmp_path / "photos" / block_files.block_name(key(1)),
        tmp_path / OLD.hex() / "mine",
        tmp_path / OLD.hex() / f"{'A' * 32}.kv",
        tmp_path / PRINT.hex() / f"{OLD.hex()}.kv.bak",
    ]
    for path in strange:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10 * FILE_BYTES))
    with caplog.at_level(logging.WARNING):
        store = open_store(tmp_path, max_blocks=2)
        for number in range(4):
            assert write(store, number)
        store.shutdown()
    assert all(path.stat().st_size == 10 * FILE_BYTES for path in strange)
    assert (tmp_path / OLDER.hex()).is_symlink() and len(list(elsewhere.iterdir())) == 3
    assert {path.name for path in (tmp_path / OLD.hex()).iterdir()} == {"mine", f"{'A' * 32}.kv"}
    assert store.num_bytes() == 2 * FILE_BYTES, "they do not count"
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and all("not written by headrace" in each and "they stay" in each for each in told)
    assert ".kv.bak" in told[0] and "5 files or folders" in told[1]


def test_where_there_are_no_locks_nothing_of_others_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError("no locks available")

    fill(tmp_path, OLD, range(3), 1000)
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(disk_store, "LOOK_S", 0.0)
    store = open_store(tmp_path, max_blocks=4)
    for number in range(5):
        assert write(store, number)
    assert names(tmp_path, OLD) == [0, 1, 2] and names(tmp_path, PRINT) == [3, 4]
    store.shutdown()


def test_what_dead_engines_left_of_other_models_is_cleared_away(tmp_path: Path) -> None:
    fill(tmp_path, OLD, range(1), 1000)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / OLD.hex() / f"{key(9).hex()}.{block_files.HOST}-{ended.pid}.tmp"
    left.write_bytes(b"half")
    (tmp_path / OLDER.hex()).mkdir()
    (tmp_path / f"{'3' * 32}.lock").touch()
    store = open_store(tmp_path)
    settle(store)
    assert not left.exists() and names(tmp_path, OLD) == [0]
    assert not (tmp_path / OLDER.hex()).exists() and not (tmp_path / f"{'3' * 32}.lock").exists()
    store.shutdown()


def test_a_kill_in_mid_removal_costs_files_only(tmp_path: Path) -> None:
    fill(tmp_path, OLD, range(300), 1000)
    source = f"""
        from pathlib import Path
        from tests.kv_transfer.test_disk_store import open_store, write
        store = open_store(Path({str(tmp_path)!r}), max_blocks=302)
        print("ready", flush=True)
        for number in range(1000, 2000):
            write(store, number)
    """
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", dedent(source)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(random.uniform(0.02, 0.1))
        process.kill()
        process.communicate()
        other = open_store(tmp_path, OLD)
        found = [number for number in range(300) if key(number) in other]
        assert all(read(other, number) == payload(number) for number in found)
        other.shutdown()
    store = open_store(tmp_path, max_blocks=302)
    settle(store)
    assert total(tmp_path) <= 302 * FILE_BYTES
    assert all(read(store, number) == payload(number) for number in range(1000, 2000) if key(number) in store)
    store.shutdown()
