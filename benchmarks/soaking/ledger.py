"""What the label file and the history of a case must hold, followed from the answers of the server."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

from pclmix.data.dataset import Dataset
from pclmix.web.strokes import KEPT
from pclmix.web.workspace import token_of

Map = npt.NDArray[np.int16]


def digest(array: npt.NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array.astype(np.int16)).tobytes()).hexdigest()


class Record:
    """What happened: counts, and findings, which should be none."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []
        self.began = time.monotonic()
        self._guard = threading.Lock()

    def count(self, name: str, number: int = 1) -> None:
        with self._guard:
            self.counts[name] += number

    def find(self, what: str) -> None:
        with self._guard:
            self.findings.append(f"{time.monotonic() - self.began:.0f} s: {what}")
        print(f"FOUND at {time.monotonic() - self.began:.0f} s: {what}", flush=True)


@dataclass
class Pending:
    """A save that was sent: based on a version, it leads to a known map."""

    base: str
    after: Map


class Ledger:
    """The states of one case in order, as acknowledged by the server or seen in its answers."""

    def __init__(self, dataset: Dataset, case: str, record: Record) -> None:
        self.dataset, self.case, self.record = dataset, case, record
        self.path = dataset.scribble_path(case)
        self.folder = dataset.root / ".pclmix" / "history" / case
        first = self.read(self.path)
        self.order = [digest(first)]
        self.known: OrderedDict[str, Map] = OrderedDict({token_of(self.path): first})
        self.pending: dict[int, Pending] = {}
        self.checked = self.number = 0
        self._files: dict[str, str] = {}
        self._guard = threading.Lock()

    def read(self, path: Path) -> Map:
        values = np.asanyarray(nib.load(path).dataobj).transpose(2, 1, 0)  # type: ignore[attr-defined]
        return self.dataset.labels.decode(values, path.name)

    def send(self, base: str, after: Map) -> int:
        with self._guard:
            self.number += 1
            self.pending[self.number] = Pending(base, after)
            return self.number

    def refused(self, number: int) -> None:
        with self._guard:
            self.pending.pop(number, None)

    def acknowledged(self, number: int, version: str) -> None:
        with self._guard:
            sent = self.pending.pop(number)
            if version not in self.known:  # else another client has seen it already
                self._append(version, sent)

    def seen(self, version: str, array: Map) -> None:
        """A map as the server answered it: a known state, or one whose save is not answered yet."""
        with self._guard:
            if version in self.known:
                if not np.array_equal(self.known[version], array):
                    self.record.find(f"{self.case}: version {version} was read with other strokes than were saved")
                return
            found = [sent for sent in self.pending.values() if np.array_equal(sent.after, array)]
            if found:
                self._append(version, found[0])
            else:
                self.record.find(f"{self.case}: the server answered strokes that nobody has drawn")

    def _append(self, version: str, sent: Pending) -> None:
        if sent.base != next(reversed(self.known)):
            self.record.find(f"{self.case}: a save was accepted although it was not based on the newest state")
        self.known[version] = sent.after
        self.order.append(digest(sent.after))
        while len(self.known) > 50:
            self.known.popitem(last=False)

    def audit(self, *, killed: bool = False, fresh: bool = False) -> None:
        """Compare file and history with what was acknowledged; no request may be under way.

        After a kill the newest state may be in both, or the history have one state too many, until the next start.
        """
        with self._guard:
            current, version = self.read(self.path), token_of(self.path)
            if digest(current) != self.order[-1]:  # a save whose answer was lost in a kill
                tail = next(reversed(self.known))
                for sent in self.pending.values():
                    if sent.base == tail and np.array_equal(sent.after, current):
                        self._append(version, sent)
                        self.record.count("saved, answer lost in a kill")
                        break
            self.pending.clear()
            expected = self.order[::-1]
            found = self._files_of_history(fresh)
            place = 0
            for state in [digest(current), *found]:
                if place < len(expected) and state == expected[place]:
                    place += 1
                elif killed and place == 1 and state == expected[0]:
                    self.record.count("saves cut off by a kill")
                else:
                    self.record.find(f"{self.case}: a state in file or history is not the one acknowledged")
                    break
            new = len(self.order) - self.checked
            lost = max(0, min(1 + KEPT, len(self.order)) - place)
            if lost:
                self.record.count("acknowledged saves lost", lost)
                self.record.find(f"{self.case}: {lost} acknowledged states are in neither file nor history")
            if len(found) > KEPT + killed:
                self.record.find(f"{self.case}: {len(found)} states in the history")
            self.record.count("states found by an audit", min(new, place))
            self.record.count("states not audited in time", max(0, new - place))
            self.checked = len(self.order)
            self.known.move_to_end(version) if version in self.known else self.known.update({version: current})

    def _files_of_history(self, fresh: bool) -> list[str]:
        """Digests of the states in the history, newest first."""
        paths = sorted(self.folder.glob("[!.]*.nii.gz"), reverse=True) if self.folder.is_dir() else []
        known = {} if fresh else self._files
        self._files = {p.name: known.get(p.name) or digest(self.read(p)) for p in paths}
        return list(self._files.values())
