"""Strokes on disk: read, edited as runs, saved to labelsTr, with earlier states kept as history.

The version is a token of the label file. Each save names the version it was based on; if the file has changed since (a
second tab, another program), nothing is written and StaleError is raised.
"""

from __future__ import annotations

import os
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

from pclmix.errors import PclmixError
from pclmix.io.files import atomic_path
from pclmix.io.volume import Geometry, read_labels, write_labels
from pclmix.labels import IGNORE, IntArray
from pclmix.web.workspace import UnknownError, Workspace, is_full, token_of

KEPT = 200  #: states of a case kept in the history
_CACHED = 3  # label maps kept in memory, so that the next save need not read the file
_ENTRY = re.compile(r"^(?P<number>\d{6,})-(?P<time>\d+)-(?P<what>[a-z]+)$")
#: start, length, class: voxels [start, start + length) of the flattened (Z, H, W) map become `class`, or IGNORE.
Run = tuple[int, int, int]


class StaleError(PclmixError):
    """The strokes have changed since the version that the edit was based on."""

    def __init__(self, version: str) -> None:
        super().__init__("these strokes were changed elsewhere since; nothing was overwritten")
        self.version = version


@dataclass(frozen=True)
class Strokes:
    """The label map of a case, (Z, H, W) with IGNORE, and the version of its file."""

    array: IntArray
    geometry: Geometry
    version: str

    def as_bytes(self) -> bytes:
        """One byte per voxel, x fastest: 0 where nothing is drawn, else class + 1."""
        return (self.array + 1).astype(np.uint8).tobytes()


@dataclass(frozen=True)
class Entry:
    """An earlier state: when it was replaced, and by what kind of edit."""

    id: str
    time: float
    what: str

    @property
    def number(self) -> int:
        return int(self.id.partition("-")[0])


class StrokeStore:
    """The strokes of a dataset. All methods are thread-safe."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._locks: dict[str, threading.Lock] = {}
        self._known: OrderedDict[str, Strokes] = OrderedDict()
        self._guard = threading.Lock()

    def read(self, case: str) -> Strokes:
        """The strokes of a case; an empty map if it has no label file yet."""
        path = self.workspace.scribble_path(case)
        found = self._read(case, version := token_of(path))
        while (now := token_of(path)) != version:  # saved meanwhile: the map may be newer than its version
            found = self._read(case, version := now)
        return found

    def _read(self, case: str, version: str) -> Strokes:
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
        """Apply runs drawn on top of `version`; returns the new version."""
        if not all(path.is_file() for path in self.workspace.image_paths(case)):
            raise UnknownError(f"the image of '{case}' was removed from the dataset; its strokes cannot be saved")
        with self._lock(case):
            before = self.read(case)
            if before.version != version:
                raise StaleError(before.version)
            array = before.array.copy()
            paint(array, runs, self.workspace.dataset.labels.count)
            return self._write(case, before, array, what)

    def merge(self, case: str, mine: IntArray, seen: IntArray, what: str = "label") -> str:
        """Three-way merge of a whole map whose author was shown `seen`: only differences from `seen` are applied.

        Strokes drawn elsewhere since are kept. Returns the new version.
        """
        with self._lock(case):
            before = self.read(case)
            array = np.where(mine != seen, mine, before.array)
            if before.version != "none" and np.array_equal(array, before.array):
                return before.version
            return self._write(case, before, array, what)

    def history(self, case: str) -> list[Entry]:
        """Earlier states, newest first."""
        return sorted((entry for _, entry in self._entries(case)), key=lambda e: e.number, reverse=True)

    def restore(self, case: str, version: str, entry: str) -> str:
        """Restore an earlier state; the current one goes into the history. Returns the new version."""
        with self._lock(case):
            before = self.read(case)
            if before.version != version:
                raise StaleError(before.version)
            path = {e.id: p for p, e in self._entries(case)}.get(entry)
            if path is None:
                raise UnknownError(f"the history of '{case}' has no state '{entry[:40]}'; it keeps the last {KEPT}")
            labels = self.workspace.dataset.labels
            array = labels.decode(read_labels(self.workspace.inside(path))[0], path.name)
            if array.shape != before.array.shape:
                raise PclmixError(f"the state '{entry}' of '{case}' has another size than the current image")
            return self._write(case, before, array, "restored")

    def _write(self, case: str, before: Strokes, array: IntArray, what: str) -> str:
        path, labels = self.workspace.scribble_path(case), self.workspace.dataset.labels
        entries = sorted((entry.number, old) for old, entry in self._entries(case))
        kept = self._keep(case, path, what, 1 + max((number for number, _ in entries), default=0))
        try:
            write_labels(path, labels.encode(array), before.geometry, labels.names)
        except BaseException:
            if kept is not None:
                kept.unlink(missing_ok=True)
            raise
        for _, old in entries[: max(0, len(entries) + 1 - KEPT)]:  # only now: a failed save must not drop a state
            with suppress(OSError):
                old.unlink()
        version = token_of(path)
        self._remember(case, Strokes(array, before.geometry, version))
        return version

    def sweep(self) -> int:
        """Complete saves that a kill cut off; returns how many history entries were removed.

        A kill before the label file was replaced leaves the current state in the history as well, one after it an
        entry more than KEPT.
        """
        count = 0
        for case in self.workspace.dataset.cases:
            with suppress(OSError, PclmixError):
                path = self.workspace.scribble_path(case)
                entries = sorted((entry.number, old) for old, entry in self._entries(case))
                surplus = [old for _, old in entries if old.samefile(path)] if path.stat().st_nlink > 1 else []
                rest = [old for _, old in entries if old not in surplus]
                for old in [*surplus, *rest[: max(0, len(rest) - KEPT)]]:
                    old.unlink()
                    count += 1
        return count

    def _keep(self, case: str, path: Path, what: str, number: int) -> Path | None:
        """Hard-link the current file into the history before it is replaced.

        A link needs no space, so it works on a full disk, and it is complete however the process ends. The file is
        never modified: the next save replaces it.
        """
        if not path.exists():
            return None
        folder = self.workspace.internal("history", case)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{number:06d}-{int(time.time() * 1000)}-{what}{self.workspace.dataset.ending}"
        try:
            os.link(path, target)
        except OSError as error:
            if is_full(error):
                raise
            with atomic_path(target) as temporary:  # a file system without links
                shutil.copyfile(path, temporary)
        return target

    def _entries(self, case: str) -> list[tuple[Path, Entry]]:
        folder, ending = self.workspace.internal("history", self.workspace.case(case)), self.workspace.dataset.ending
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


def runs_of(array: npt.NDArray[np.int16]) -> list[Run]:
    """The drawn voxels of a map as runs, in order."""
    flat = array.reshape(-1)
    drawn = np.flatnonzero(flat >= 0)
    if not drawn.size:
        return []
    ends = np.flatnonzero((np.diff(drawn) != 1) | (np.diff(flat[drawn]) != 0))
    starts = drawn[np.concatenate([[0], ends + 1])]
    lengths = np.diff(np.concatenate([[0], ends + 1, [drawn.size]]))
    return list(zip(starts.tolist(), lengths.tolist(), flat[starts].tolist(), strict=True))


def paint(array: npt.NDArray[np.int16], runs: Sequence[Run], classes: int) -> None:
    """Write runs into a map (Z, H, W) in place; runs outside the map or of unknown classes are refused."""
    if not runs:
        return
    table = np.asarray(runs, np.int64)
    start, length, value = table.T
    if start.min() < 0 or length.min() < 1 or bool((start > array.size - length).any()):
        raise PclmixError(f"a stroke lies outside the image of {array.size} voxels; reload the page")
    if value.min() < IGNORE or value.max() >= classes:
        raise PclmixError(f"a stroke has a class that is not in dataset.json (0 to {classes - 1})")
    flat = array.reshape(-1)
    for first, count, k in table.tolist():
        flat[first : first + count] = k
