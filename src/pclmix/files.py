"""Writing that either happens or does not: temporary names beside the target, then one rename."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pclmix.errors import PclmixError


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Give a temporary path with the target's endings; on success it is synced and becomes the target."""
    target = Path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            prefix=f".{target.name.split('.')[0]}-", suffix="".join(target.suffixes), dir=target.parent
        )
        os.close(handle)
    except OSError as error:
        raise PclmixError(f"cannot write {target}: {error.strerror}; choose a folder you may write to") from error
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        raise PclmixError(
            f"cannot write {target}: {error.strerror or error}; the old file, if any, is untouched"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def sweep(target: Path) -> None:
    """Remove what killed writers of `target` left beside it; nobody may be writing it now."""
    for stray in target.parent.glob(f".{target.name.split('.')[0]}-????????{''.join(target.suffixes)}"):
        stray.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give an empty temporary folder beside the target that becomes the target on success.

    An existing target is refused unless it is an empty folder or `overwrite` is set.
    """
    target = Path(target)
    refuse_existing(target, overwrite=overwrite)
    require_writable(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        temporary.chmod(0o777 & ~_umask())
    except OSError as error:
        raise PclmixError(f"cannot write {target}: {error.strerror}; choose a folder you may write to") from error
    try:
        yield temporary
        if overwrite and target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
    except OSError as error:
        raise PclmixError(f"cannot write {target}: {error.strerror or error}; nothing was left behind") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(
    target: Path, *, overwrite: bool = False, way_out: str = "choose another name or remove it first"
) -> None:
    """Refuse to write over something that is there, unless told to; the message ends with the way out."""
    target = Path(target)
    try:
        taken = target.exists() and not (target.is_dir() and not any(target.iterdir()))
    except OSError as error:
        raise PclmixError(f"cannot write {target}: {error.strerror}; choose a folder you may write to") from error
    if taken and not overwrite:
        raise PclmixError(f"{target} exists already; {way_out}")
    if overwrite and target.is_file():
        raise PclmixError(f"{target} is a file where a folder is to be written; choose another name")


def require_writable(target: Path) -> None:
    """Refuse now what could not be written after the work.

    Tried for real, since rights do not say everything (a read-only or full disk): in `target` where it is a folder,
    else in the nearest folder above it that exists. Nothing is left behind.
    """
    target = Path(target)
    try:
        places = target.parents if target.is_file() else (target, *target.parents)
        folder = next((place for place in places if place.exists()), Path())
        with tempfile.TemporaryFile(prefix=".pclmix-", dir=folder):
            pass
    except OSError as error:
        raise PclmixError(f"cannot write {target}: {error.strerror}; choose a folder you may write to") from error


def require_new_file(target: Path) -> None:
    """Refuse, before the work, a file that exists already or cannot be written."""
    refuse_existing(target)
    if Path(target).is_dir():
        raise PclmixError(f"{target} is a folder, a file is to be written; add the file's name")
    require_writable(target)


def write_json(path: Path, content: Any) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    try:
        # Some editors put a mark in front that says "UTF-8".
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise PclmixError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PclmixError(f"{path} is not valid JSON: {error}") from error
    except OSError as error:
        raise PclmixError(f"cannot read {path}: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
