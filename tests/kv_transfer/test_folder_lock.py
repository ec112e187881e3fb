"""Who uses a folder: known to every process, and for no longer than the user lives."""

from __future__ import annotations

from pathlib import Path

from headrace.kv_transfer.folder_lock import FolderLock


def test_users_share_a_folder_and_its_remover_does_not(tmp_path: Path) -> None:
    first, second, remover = (FolderLock(tmp_path / "folder") for _ in range(3))
    assert first.hold() and second.hold() and first.hold()
    assert not remover.take_alone()
    first.release()
    assert not remover.take_alone()
    del second
    assert remover.take_alone()
    remover.release()
    assert first.hold()


def test_a_lock_whose_file_was_removed_holds_nothing_and_is_taken_anew(tmp_path: Path) -> None:
    user, remover = FolderLock(tmp_path / "folder"), FolderLock(tmp_path / "folder")
    assert user.hold()
    (tmp_path / "folder.lock").unlink()
    assert user.hold() and not remover.take_alone()
    user.release()
    assert remover.take_alone()
    remover.remove()
    remover.release()
    assert not list(tmp_path.iterdir())


def test_somebody_who_removes_is_waited_for_but_not_for_ever(tmp_path: Path) -> None:
    remover, user = FolderLock(tmp_path / "folder"), FolderLock(tmp_path / "folder")
    assert remover.take_alone() and not user.hold()
    remover.release()
    assert user.hold()


def test_a_place_where_nothing_can_be_written_has_no_locks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lock = FolderLock(tmp_path / "file" / "folder")
    assert not lock.hold() and not lock.take_alone()
