"""Predictions that the workbench keeps: label maps, how unsure the model was, and where a stroke would help most.

RUN/CASE.nii.gz is the label map, RUN/CASE.npz holds `unsure` (entropy in steps of ln K / 255) and `second` (the
runner-up class), RUN/CASE.json what the list of cases shows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from pclmix.data.volume import Geometry, read_labels, write_labels
from pclmix.errors import PclmixError
from pclmix.files import atomic_path, read_json, write_json
from pclmix.labels import Labels
from pclmix.web.workspace import UnknownError, Workspace

Array = npt.NDArray[Any]
_EPSILON = 1e-6
_PLACES = 12  # suggestions at most
_PER_SLICE = 2
_LOOKED_AT = 40  # slices, the least certain ones: a volume of hundreds answers as fast as one of tens


@dataclass(frozen=True)
class Scores:
    """What a model says of one volume: classes, runner-up and entropy as a byte, each (Z, H, W), and a quality."""

    labels: Array
    second: Array
    unsure: Array
    quality: float


class Scorer:
    """Collects softmax slices (B, K, H, W) of one volume and keeps bytes of them only."""

    def __init__(self) -> None:
        self._parts: list[tuple[Array, Array, Array]] = []
        self._overlap: Array = np.zeros(0)
        self._sum: Array = np.zeros(0)

    def add(self, q: Array) -> None:
        k = q.shape[1]
        order = np.argsort(q, axis=1)
        labels, second = order[:, -1].astype(np.uint8), order[:, -2].astype(np.uint8)
        entropy = -(q * np.log(q + _EPSILON)).sum(1)  # equation 5
        unsure = np.clip(np.rint(entropy * (255 / np.log(k))), 0, 255).astype(np.uint8)
        self._parts.append((labels, second, unsure))
        mine = np.stack([(labels == c) for c in range(k)], 1)
        overlap, total = (q * mine).sum((0, 2, 3)), q.sum((0, 2, 3)) + mine.sum((0, 2, 3))
        self._overlap = overlap if not self._overlap.size else self._overlap + overlap
        self._sum = total if not self._sum.size else self._sum + total

    def finish(self) -> Scores:
        """Quality is the Dice that the model itself expects: 2 sum(q m) / (sum(q) + sum(m)), m its own mask.

        The mean over the classes it found, background left out; 0 where it found none. A model that is surer than
        it should be expects too much, so this orders cases rather than promising a score.
        """
        labels, second, unsure = (np.concatenate([part[i] for part in self._parts]) for i in range(3))
        found = [c for c in range(1, len(self._sum)) if (labels == c).any()]
        quality = float(np.mean([2 * self._overlap[c] / self._sum[c] for c in found])) if found else 0.0
        return Scores(labels, second, unsure, quality)


class PredictionBook:
    """The predictions of a dataset, by run and case."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def folder(self, run: str) -> Path:
        return self.workspace.corner("predictions", run)

    def write(self, run: str, case: str, scores: Scores, geometry: Geometry, labels: Labels, strokes: Array) -> None:
        """Keep a prediction; the JSON comes last, so that what it speaks of is there."""
        folder = self.folder(run)
        write_labels(folder / f"{case}.nii.gz", scores.labels, geometry, labels.names)
        with atomic_path(folder / f"{case}.npz") as temporary:
            np.savez_compressed(temporary, unsure=scores.unsure, second=scores.second)
        drawn = strokes >= 0
        agreement = float((scores.labels[drawn] == strokes[drawn]).mean()) if drawn.any() else None
        slices = (scores.unsure.mean(axis=(1, 2)) / 255).round(4).tolist()
        about = {"quality": round(scores.quality, 4), "agreement": agreement, "unsure": slices, "time": time.time()}
        write_json(folder / f"{case}.json", about)

    def of(self, case: str) -> list[dict[str, Any]]:
        """What is known of each prediction of a case, newest first."""
        found = []
        top = self.workspace.corner("predictions")
        for path in top.glob(f"*/{_escaped(case)}.json") if top.is_dir() else ():
            try:
                about = read_json(self.workspace.inside(path))
            except PclmixError:
                continue
            found.append({**about, "run": path.parent.name})
        return sorted(found, key=lambda about: float(about["time"]), reverse=True)

    def labels(self, case: str, back: int = 0) -> tuple[Array, Geometry]:
        """The label map of a case, `back` predictions before the newest."""
        return read_labels(self._path(case, ".nii.gz", back))

    def unsure(self, case: str) -> tuple[Array, Array]:
        """Entropy as a byte and the runner-up class, each (Z, H, W), of the newest prediction."""
        with np.load(self._path(case, ".npz", 0), allow_pickle=False) as content:
            return content["unsure"], content["second"]

    def difference(self, case: str) -> tuple[Array, Geometry]:
        """1 where the newest prediction differs from the one before."""
        (now, geometry), (before, _) = self.labels(case), self.labels(case, 1)
        if now.shape != before.shape:
            raise PclmixError(f"the predictions of '{case}' have different sizes; predict it again")
        return (now != before).astype(np.uint8), geometry

    def _path(self, case: str, ending: str, back: int) -> Path:
        known = self.of(self.workspace.case(case))
        if len(known) <= back:
            which = "no prediction yet" if not known else "only one prediction; there is nothing to compare it with"
            raise UnknownError(f"'{case}' has {which}")
        return self.workspace.inside(self.folder(str(known[back]["run"])) / f"{case}{ending}")


def where_next(unsure: Array, labels: Array, second: Array, strokes: Array) -> list[dict[str, Any]]:
    """The places where a stroke would help most, best first: peaks of the blurred entropy away from strokes.

    unsure: (Z, H, W) bytes. Each place has slice z, row y, column x, a score in [0, 1] and the two classes in doubt.
    """
    height, width = unsure.shape[1:]
    reach = max(2.0, min(height, width) / 40)
    places: list[dict[str, Any]] = []
    for z in np.argsort(-unsure.mean(axis=(1, 2)), kind="stable")[:_LOOKED_AT].tolist():
        plane = ndimage.gaussian_filter(unsure[z].astype(np.float32) / 255, reach / 2)
        drawn = strokes[z] >= 0
        if drawn.any():  # a place beside a stroke has been answered already
            near = ndimage.distance_transform_edt(~drawn)
            plane *= 1 - np.exp(-0.5 * (near / reach) ** 2)
        for _ in range(_PER_SLICE):
            y, x = np.unravel_index(int(plane.argmax()), plane.shape)
            score = float(plane[y, x])
            if score < 0.05:
                break
            doubt = sorted({int(labels[z, y, x]), int(second[z, y, x])})
            places.append({"z": z, "y": int(y), "x": int(x), "score": round(score, 3), "classes": doubt})
            rows, columns = np.ogrid[:height, :width]
            plane[(rows - y) ** 2 + (columns - x) ** 2 < (4 * reach) ** 2] = 0
    return sorted(places, key=lambda place: -place["score"])[:_PLACES]


def _escaped(case: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in case)
