"""Atomic writes."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path

import pytest

from pclmix.errors import PclmixError
from pclmix.io.files import (
    atomic_folder,
    atomic_path,
    refuse_existing,
    require_new_file,
    require_writable,
    sweep,
    sweep_folder,
    sweep_leftovers,
)


def test_files_appear_when_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "a.nii.gz"
    with atomic_path(target) as temporary:
        temporary.write_text("new")
        assert not target.exists()
        assert temporary.name.endswith(".nii.gz")
    assert target.read_text() == "new"
    assert [p.name for p in target.parent.iterdir()] == ["a.nii.gz"]


def fail_while_writing(target: Path) -> None:
    with atomic_path(target) as temporary:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(PclmixError, match=rf"a\.txt.*{os.strerror(errno.ENOSPC)}"):
        fail_while_writing(target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_sweep_removes_only_temporary_files(tmp_path: Path) -> None:
    kept = [".last-notes.ckpt", ".zsh-history", "last.ckpt", ".last-12345678.yaml"]
    for name in (*kept, ".last-a1b2c3d4.ckpt"):
        (tmp_path / name).write_text("")
    sweep(tmp_path / "last.ckpt")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)
    sweep(tmp_path / "nowhere" / "last.ckpt")


def test_a_folder_created_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def race() -> None:
        with atomic_folder(target) as temporary:
            (temporary / "mine").write_text("")
            target.mkdir()
            (target / "theirs").write_text("")

    with pytest.raises(PclmixError, match=re.escape(str(target))):
        race()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [p.name for p in target.iterdir()] == ["theirs"]


def test_existing_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PclmixError, match=re.escape(str(tmp_path))):
        refuse_existing(tmp_path)
    refuse_existing(tmp_path, overwrite=True)
    with pytest.raises(PclmixError, match="file"):
        refuse_existing(tmp_path / "file", overwrite=True)
    (tmp_path / "empty").mkdir()
    refuse_existing(tmp_path / "empty")


def test_unwritable_paths_are_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    for good in (tmp_path, tmp_path / "new" / "deep" / "a.json", tmp_path / "file", Path("relative") / "a"):
        require_writable(good)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    bad = {"file/a.json": errno.ENOTDIR, f"{'x' * 300}.json": errno.ENAMETOOLONG}
    for name, reason in bad.items():
        with pytest.raises(PclmixError, match=os.strerror(reason)):
            require_writable(tmp_path / name)


def test_require_new_file_refuses_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    require_new_file(tmp_path / "a.json")
    with pytest.raises(PclmixError, match=re.escape(str(tmp_path / "file"))):
        require_new_file(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PclmixError, match=re.escape(str(tmp_path / "empty"))):
        require_new_file(tmp_path / "empty")


def test_temporary_files_of_killed_writers_are_removed_on_write(tmp_path: Path) -> None:
    def leave(name: str, hours: float) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "half").write_text("")
        for each in (path / "half", path):
            os.utime(each, (time.time() - 3600 * hours,) * 2)
        return path

    old, fresh = leave(".out-a1b2c3d4", 2), leave(".out-e5f6g7h8", 0.1)
    others = [leave(".other-a1b2c3d4", 2), leave(".config-settings", 2), leave(".out-UPPERCAS", 2)]
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("")
    assert not old.exists()
    assert all(path.exists() for path in (fresh, *others))
    (tmp_path / ".case-a1b2c3d4.nii.gz").write_text("")
    (tmp_path / "kept").symlink_to(fresh)
    sweep_folder(tmp_path, {"case.nii.gz"})
    assert (tmp_path / ".case-a1b2c3d4.nii.gz").exists(), "somebody may be writing it"
    sweep_folder(tmp_path, {"case.nii.gz"}, older=-1)
    assert not (tmp_path / ".case-a1b2c3d4.nii.gz").exists()
    sweep_folder(tmp_path / "nowhere", {"case.nii.gz"})
    left, mine = leave(".curves-a1b2c3d4.png", 2), leave(".notes-20240101.txt", 2)
    (tmp_path / "curves.png").write_text("whole")
    sweep_leftovers(tmp_path)
    sweep_leftovers(tmp_path / "nowhere")
    assert not left.exists()
    assert mine.exists(), "there is no notes.txt that somebody could have been writing"
