"""Strokes on disk: read, changed run by run, saved whole into labelsTr, with every earlier state kept for a while.

A version is a token of the file itself. Whoever saves says which version the change was made on; if the file has
another by now (a second tab, another program), nothing is written and the caller is told.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pclmix.data.volume import Geometry, read_labels, write_labels
from pclmix.errors import PclmixError
from pclmix.labels import IGNORE, IntArray
from pclmix.web.workspace import UnknownError, Workspace, token_of

KEPT = 200  #: states of a case that history holds
_CACHED = 3  # label maps held in memory: saving the next stroke of a case need not read it again
_ENTRY = re.compile(r"^(?P<number>\d{6})-(?P<time>\d+)-(?P<what>[a-z]+)$")
#: start, length, class: voxels [start, start + length) of the flattened (Z, H, W) map become `class`, or IGNORE.
Run = tuple[int, int, int]


class StaleError(PclmixError):
    """The strokes have changed since the version that a change was made on."""

    def __init__(self, version: str) -> None:
        super().__init__("these strokes were changed elsewhere in the meantime; nothing was overwritten")
        self.version = version


@dataclass(frozen=True)
class Strokes:
    """The label map of a case, (Z, H, W) with IGNORE, and the version of the file it came from."""

    array: IntArray
    geometry: Geometry
    version: str

    def as_bytes(self) -> bytes:
        """One byte a voxel, x fastest: 0 where nothing is drawn, else class + 1."""
        return (self.array + 1).astype(np.uint8).tobytes()


@dataclass(frozen=True)
class Entry:
    """A state that a save replaced: when, and by what."""

    id: str
    time: float
    what: str


class StrokeBook:
    """The strokes of a dataset. All methods may be called from several threads."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._locks: dict[str, threading.Lock] = {}
        self._known: OrderedDict[str, Strokes] = OrderedDict()
        self._guard = threading.Lock()

    def read(self, case: str) -> Strokes:
        """The strokes of a case; an image without a label file has none yet."""
        path = self.workspace.scribble_path(case)
        version = token_of(path)
        with self._guard:
            known = self._known.get(case)
        if known is not None and known.version == version:
            return known
        if version == "none":
            self.workspace.image_paths(case)
            geometry = self.workspace.dataset.read_image(case).geometry
            found = Strokes(np.full(geometry.shape, IGNORE, np.int16), geometry, version)
        else:
            array, geometry = self.workspace.dataset.read_scribble(case)
            found = Strokes(array, geometry, version)
        self._remember(case, found)
        return found

    def save(self, case: str, version: str, runs: Sequence[Run], what: str = "strokes") -> str:
        """Apply runs to the version they were drawn on; returns the new version."""
        if not all(path.is_file() for path in self.workspace.image_paths(case)):
            raise UnknownError(f"the image of '{case}' is gone from the dataset, so its strokes have no place")
        with self._lock(case):
            before = self.read(case)
            if before.version != version:
                raise StaleError(before.version)
            array = before.array.copy()
            paint(array, runs, self.workspace.dataset.labels.count)
            return self._write(case, before, array, what)

    def history(self, case: str) -> list[Entry]:
        """The states that were replaced, newest first."""
        return sorted((entry for _, entry in self._entries(case)), key=lambda e: e.id, reverse=True)

    def restore(self, case: str, version: str, entry: str) -> str:
        """Make an earlier state the present one; the present one goes into history. Returns the new version."""
        with self._lock(case):
            before = self.read(case)
            if before.version != version:
                raise StaleError(before.version)
            path = {e.id: p for p, e in self._entries(case)}.get(entry)
            if path is None:
                raise UnknownError(f"history of '{case}' has no state '{entry[:40]}'; it keeps the last {KEPT}")
            labels = self.workspace.dataset.labels
            array = labels.decode(read_labels(self.workspace.inside(path))[0], path.name)
            if array.shape != before.array.shape:
                raise PclmixError(f"the state '{entry}' of '{case}' has another size than its image now has")
            return self._write(case, before, array, "restored")

    def _write(self, case: str, before: Strokes, array: IntArray, what: str) -> str:
        path, labels = self.workspace.scribble_path(case), self.workspace.dataset.labels
        self._keep(case, path, what)
        write_labels(path, labels.encode(array), before.geometry, labels.names)
        version = token_of(path)
        self._remember(case, Strokes(array, before.geometry, version))
        return version

    def _keep(self, case: str, path: Path, what: str) -> None:
        """Copy the file as it is into history before it is replaced."""
        if not path.exists():
            return
        folder = self.workspace.corner("history", case)
        folder.mkdir(parents=True, exist_ok=True)
        entries = sorted(self._entries(case), key=lambda pair: pair[1].id)
        number = int(entries[-1][1].id[:6]) + 1 if entries else 1
        name = f"{number:06d}-{int(time.time() * 1000)}-{what}{self.workspace.dataset.ending}"
        shutil.copyfile(path, folder / name)
        for old, _ in entries[: max(0, len(entries) + 1 - KEPT)]:
            with suppress(OSError):
                old.unlink()

    def _entries(self, case: str) -> list[tuple[Path, Entry]]:
        folder, ending = self.workspace.corner("history", self.workspace.case(case)), self.workspace.dataset.ending
        found = []
        for path in folder.glob(f"*{ending}") if folder.is_dir() else ():
            match = _ENTRY.match(path.name[: -len(ending)])
            if match:
                name = path.name[: -len(ending)]
                found.append((path, Entry(name, int(match["time"]) / 1000, match["what"])))
        return found

    def _remember(self, case: str, strokes: Strokes) -> None:
        with self._guard:
            self._known[case] = strokes
            self._known.move_to_end(case)
            while len(self._known) > _CACHED:
                self._known.popitem(last=False)

    def _lock(self, case: str) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(case, threading.Lock())


def paint(array: npt.NDArray[np.int16], runs: Sequence[Run], classes: int) -> None:
    """Write runs into a map (Z, H, W) in place; a run that leaves the map or names no class is refused."""
    if not runs:
        return
    table = np.asarray(runs, np.int64)
    start, length, value = table.T
    if start.min() < 0 or length.min() < 1 or bool((start > array.size - length).any()):
        raise PclmixError(f"a stroke leaves the image of {array.size} voxels; load the case again")
    if value.min() < IGNORE or value.max() >= classes:
        raise PclmixError(f"a stroke has a class that dataset.json does not have (0 to {classes - 1})")
    flat = array.reshape(-1)
    for first, count, k in table.tolist():
        flat[first : first + count] = k
