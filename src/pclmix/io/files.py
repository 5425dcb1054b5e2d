"""Atomic writes: a temporary name beside the target, then one rename. Size limits, asked before decoding.

A few hundred kilobytes can hold gigabytes of zeros, and a header can claim any size.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pclmix.errors import PclmixError

VARIABLE = "PCLMIX_MAX_BYTES"
MAX_BYTES = 4 << 30  #: of one image, unpacked
MAX_JSON = 64 << 20  #: of a JSON file


def max_bytes() -> int:
    """The limit for one image: that of the environment variable PCLMIX_MAX_BYTES, else MAX_BYTES."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return MAX_BYTES
    if not text.isdecimal() or len(text) > 18 or int(text) == 0:
        raise PclmixError(f"{VARIABLE}={text[:40]}: a number of bytes is needed, such as {MAX_BYTES}")
    return int(text)


def require_size(path: Path, count: int) -> None:
    """Refuse an image that would take more than the limit in memory."""
    limit = max_bytes()
    if count > limit:
        raise PclmixError(
            f"{path} unpacks to {count / 2**20:,.0f} MiB, more than the {limit / 2**20:,.0f} MiB allowed; cut it into "
            f"parts, or set {VARIABLE} to {count} or more if the memory is there"
        )


#: Names that mkstemp and mkdtemp make below.
_UNFINISHED = re.compile(r"^\.(?P<stem>.+)-[a-z0-9_]{8}(?P<ending>\..*)?$")


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
    """Remove temporary files of killed writers of `target`; no process may be writing it."""
    for stray in target.parent.glob(f".{target.name.split('.')[0]}-????????{''.join(target.suffixes)}"):
        stray.unlink(missing_ok=True)


def sweep_folder(folder: Path, names: Collection[str], older: float = 3600.0) -> None:
    """Remove temporary files of killed writers of `names` in `folder`, if older than `older` seconds."""
    for path in folder.glob(".*-????????*") if folder.is_dir() else ():
        match = _UNFINISHED.match(path.name)
        if match is None or match["stem"] + (match["ending"] or "") not in names or path.is_symlink():
            continue
        with suppress(OSError):
            touched = max((p.stat().st_mtime for p in (path, *path.rglob("*"))), default=0.0)
            if time.time() - touched < older:
                continue  # may be in use
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def sweep_leftovers(folder: Path, older: float = 3600.0) -> None:
    """Remove temporary files of killed writers beside the files of `folder`; other hidden files stay."""
    with suppress(OSError):
        sweep_folder(folder, {path.name for path in folder.iterdir() if not path.name.startswith(".")}, older)


@contextmanager
def atomic_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give an empty temporary folder beside the target that becomes the target on success.

    An existing target is refused unless it is an empty folder or `overwrite` is set.
    """
    target = Path(target)
    refuse_existing(target, overwrite=overwrite)
    require_writable(target)
    sweep_folder(target.parent, {target.name})
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
    """Refuse to overwrite an existing path without `overwrite`; the message ends with the way out."""
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
    """Refuse, before the work, a path that cannot be written.

    Writes a test file, since permissions do not show a read-only or full disk: in `target` if it is a folder, else in
    the nearest existing parent. The test file is removed.
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
        size = Path(path).stat().st_size
        if size > MAX_JSON:
            raise PclmixError(f"{path} has {size >> 20} MiB, more than a JSON file of pclmix can have; is it one?")
        # Some editors write a byte order mark.
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise PclmixError(f"{path} does not exist") from None
    except RecursionError:
        raise PclmixError(f"{path} is not valid JSON for pclmix: it is nested too deeply") from None
    except ValueError as error:  # invalid JSON, bytes that are no text, an integer of thousands of digits
        raise PclmixError(f"{path} is not valid JSON: {str(error)[:200]}") from error
    except OSError as error:
        raise PclmixError(f"cannot read {path}: {error.strerror}") from error


def read_table(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise PclmixError(f"{path} is damaged: a JSON object is needed; repair or remove it")
    return content


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class KeptFiles:
    """Files read once and kept in memory, up to `limit` bytes in total."""

    def __init__(self, limit: int = 2 << 30) -> None:
        self.limit = limit
        self._kept: dict[Path, bytes] = {}

    def read(self, path: Path) -> bytes | None:
        """The content of a file; None if unreadable, which the later reader reports."""
        content = self._kept.get(path)
        if content is None:
            try:
                content = path.read_bytes()
            except OSError:
                return None
            if sum(map(len, self._kept.values())) + len(content) <= self.limit:
                self._kept[path] = content
        return content

    def clear(self) -> None:
        self._kept.clear()
