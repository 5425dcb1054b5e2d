"""File transfer between nodes without a shared folder.

A dataset or model goes to each node once; the files of a run go back to the study. Nodes that see the driver's folders
transfer nothing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from pclmix.data.dataset import IMAGES, REFERENCE, SCRIBBLES, SPLITS
from pclmix.data.store import cache_folder
from pclmix.io.files import atomic_folder, atomic_path

PIECE = 2**26  #: bytes of files sent as one object
PATIENCE = 20.0  #: large files wait so many times as long as the last transfer took, which limits transfers to 5 %
SMALL = 2**20  #: bytes; smaller files are sent as soon as they change
Files = dict[str, bytes]


def dataset_files(root: Path) -> list[Path]:
    """The files of a dataset: two JSON files and everything in its three folders."""
    heads = [root / "dataset.json", root / SPLITS]
    folders = [root / name for name in (IMAGES, SCRIBBLES, REFERENCE)]
    found = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir()) if path.is_file()]
    return [path for path in (*heads, *found) if path.is_file()]


def fingerprint(root: Path) -> str:
    """Changes with the names and sizes of a dataset's files and with the content of its JSON files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in dataset_files(root):
        head = path.read_bytes() if path.parent == root else b""
        digest.update(json.dumps([str(path.relative_to(root)), path.stat().st_size]).encode() + head)
    return digest.hexdigest()


@lru_cache(maxsize=64)
def sees(root: Path, wanted: str) -> bool:
    """Whether this node sees the driver's dataset at this path; cached per process."""
    try:
        return fingerprint(root) == wanted
    except OSError:
        return False


def pieces(paths: Sequence[Path], root: Path) -> Iterator[Files]:
    """The content of files by their path below `root`, about PIECE bytes at a time."""
    piece: Files = {}
    for path in paths:
        piece[str(path.relative_to(root))] = path.read_bytes()
        if sum(map(len, piece.values())) >= PIECE:
            yield piece
            piece = {}
    if piece:
        yield piece


def unpack(name: str, key: str, take: Callable[[], Iterator[Files]]) -> Path:
    """The folder `name` in this node's cache, written from the pieces of `take`, unless the node has it already.

    A lock lets one task of the node write it; the others wait and use it.
    """
    folder = cache_folder() / "carried" / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{key}.lock")):
        if not folder.is_dir():
            with atomic_folder(folder) as temporary:
                for piece in take():
                    write_files(temporary / name, piece)
    return folder / name


def write_files(folder: Path, files: Files) -> None:
    """Write each file atomically."""
    for name, content in files.items():
        with atomic_path(folder / name) as temporary:
            temporary.write_bytes(content)


class Shelf:
    """An actor on the driver's node that serves files to nodes that cannot read them; read on the first request."""

    def __init__(self, root: Path, files: Sequence[Path]) -> None:
        self.root, self.files = root, files
        self._stored: list[Any] = []

    def stored(self) -> list[Any]:
        """The files as objects in Ray's store."""
        import ray

        if not self._stored:
            self._stored = [ray.put(piece) for piece in pieces(self.files, self.root)]
        return self._stored


def take(shelf: Any) -> Iterator[Files]:
    """The files of a shelf, one piece at a time."""
    import ray

    for ref in ray.get(shelf.stored.remote()):
        yield ray.get(ref)


class Depot(Shelf):
    """Gives nodes without access to the driver's folders the dataset, and fetches and stores run folders."""

    def __init__(self, dataset: Path, study: Path) -> None:
        super().__init__(dataset, dataset_files(dataset))
        self.study = study

    def fetch(self, folder: str) -> Files:
        """The files of a run folder that the study has."""
        root = self.study / folder
        found = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.startswith(".")]
        return {str(path.relative_to(root)): path.read_bytes() for path in found}

    def store(self, folder: str, files: Files) -> None:
        write_files(self.study / folder, files)


class Courier:
    """Sends the files of a folder that changed since the last time.

    A checkpoint is read before metrics.jsonl and written after it: the study never has a checkpoint without the lines
    that led to it. Files named in `last` are written last; those in `held` are sent only in the final round.
    """

    def __init__(self, folder: Path, send: Callable[[Files], None], last: Sequence[str] = (), held: str = "") -> None:
        self.folder, self.send, self.last, self.held = folder, send, last, held
        self._sent: dict[str, tuple[int, int]] = {}
        self._not_before = 0.0

    def known(self) -> None:
        """Mark the present files as sent."""
        self._sent = self._stamps()

    def carry(self, *, everything: bool = False) -> None:
        """Send one round of changes; large files only occasionally, unless the last round sends `everything`."""
        stamps = {name: stamp for name, stamp in self._stamps().items() if self._sent.get(name) != stamp}
        if not everything:
            resting = time.monotonic() < self._not_before
            stamps = {
                name: (when, size)
                for name, (when, size) in stamps.items()
                if name != self.held and not (resting and size > SMALL)
            }
        files = {}
        for name in sorted(stamps, key=lambda name: not name.endswith(".ckpt")):
            with suppress(FileNotFoundError):  # replaced meanwhile: sent in the next round
                files[name] = (self.folder / name).read_bytes()
        if not files:
            return
        started = time.monotonic()
        # The receiver writes in this order: small files, checkpoints, then the files that mark the run as done.
        self.send(dict(sorted(files.items(), key=lambda entry: (entry[0] in self.last, entry[0].endswith(".ckpt")))))
        self._sent |= {name: stamps[name] for name in files}
        if any(len(content) > SMALL for content in files.values()):
            now = time.monotonic()
            self._not_before = now + PATIENCE * (now - started)

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """Time of change and size of every file, by its path in the folder; temporary files are hidden ones."""
        stamps = {}
        for path in sorted(self.folder.rglob("*")):
            with suppress(FileNotFoundError):
                if path.is_file() and not path.name.startswith("."):
                    status = path.stat()
                    stamps[str(path.relative_to(self.folder))] = (status.st_mtime_ns, status.st_size)
        return stamps
