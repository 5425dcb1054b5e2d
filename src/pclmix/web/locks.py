"""One server at a time on a dataset, and what a killed one left behind."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import lock_descriptor

from pclmix.data.dataset import IMAGES, SCRIBBLES
from pclmix.errors import PclmixError
from pclmix.io.files import read_json, write_json
from pclmix.web.workspace import Workspace

ABOUT = "server.json"
#: The names that `io.files.atomic_path` and mkdtemp give to what is not finished.
_UNFINISHED = re.compile(r"^\..*-[a-z0-9_]{8}(?:\.[A-Za-z0-9.]+)?$")


@dataclass(frozen=True)
class Claim:
    """A dataset held by this process; not `held` where the folder cannot be written or has no locks."""

    workspace: Workspace
    held: bool

    def announce(self, address: str) -> None:
        """Leave the address for whoever is refused; without a token in it, for others may read the folder."""
        if self.held:
            with suppress(PclmixError):  # a full disk must not keep anybody from looking at the dataset
                write_json(self.workspace.corner(ABOUT), {"address": address, "process": os.getpid()})


@contextmanager
def claimed(workspace: Workspace) -> Iterator[Claim]:
    """Hold a dataset for this server; a second server is refused with the address of the first.

    Strokes are compared and written under locks of one process: a second one would lose them. The lock goes with the
    process, however it ends.
    """
    handle = _open(workspace)
    if handle is None:
        yield Claim(workspace, False)
        return
    try:
        try:
            free = lock_descriptor(handle, blocking=False)
        except OSError:
            yield Claim(workspace, False)
            return
        about = workspace.corner(ABOUT)
        if not free:
            raise PclmixError(
                f"{workspace.root} is open in another workbench{_where(about)}; use that one, or end it first"
            )
        try:
            yield Claim(workspace, True)
        finally:
            about.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _open(workspace: Workspace) -> int | None:
    try:
        workspace.corner().mkdir(exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(workspace.corner("server.lock"), flags, 0o644)
    except OSError:
        return None


def _where(about: Path) -> str:
    """Where the other server is, as far as it has said so."""
    with suppress(PclmixError, KeyError, TypeError):
        content = read_json(about)
        return f" at {content['address']} (process {content['process']})"
    return ""


def sweep(workspace: Workspace) -> int:
    """Remove what killed servers left: unfinished files beside labels and images, uploads not yet added.

    Only whoever holds the dataset may call this. What jobs write is left alone: one may still run.
    """
    count = 0
    ending = re.escape(workspace.dataset.ending)
    for folder in (workspace.root, workspace.root / IMAGES, workspace.root / SCRIBBLES, workspace.corner()):
        wanted = re.compile(rf"{ending}$|\.json$")
        for path in folder.glob(".*-????????*") if folder.is_dir() else ():
            if _UNFINISHED.match(path.name) and wanted.search(path.name) and path.is_file() and not path.is_symlink():
                with suppress(OSError):
                    path.unlink()
                    count += 1
    incoming = workspace.corner("incoming")
    if incoming.is_dir():
        count += sum(1 for _ in incoming.iterdir())
        shutil.rmtree(incoming, ignore_errors=True)
    return count
