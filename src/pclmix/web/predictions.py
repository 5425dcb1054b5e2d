"""Predictions that the workbench keeps: label maps, and how unsure the model was.

RUN/CASE.nii.gz is the label map, RUN/CASE.npz holds `unsure` (entropy in steps of ln K / 255) and `second` (the
runner-up class), RUN/CASE.json what the list of cases shows.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pclmix.errors import PclmixError
from pclmix.inference.uncertainty import Examined
from pclmix.io.files import atomic_path, read_json, write_json
from pclmix.io.volume import Geometry, read_labels, write_labels
from pclmix.labels import Labels
from pclmix.web.workspace import UnknownError, Workspace

Array = npt.NDArray[Any]


class PredictionBook:
    """The predictions of a dataset, by run and case."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def folder(self, run: str) -> Path:
        return self.workspace.corner("predictions", run)

    def write(self, run: str, case: str, found: Examined, geometry: Geometry, labels: Labels, strokes: Array) -> None:
        """Keep a prediction; the JSON comes last, so that what it speaks of is there."""
        folder = self.folder(run)
        write_labels(folder / f"{case}.nii.gz", found.labels, geometry, labels.names)
        steps = 255 / math.log(labels.count)
        unsure = np.clip(np.rint(found.entropy * steps), 0, 255).astype(np.uint8)
        with atomic_path(folder / f"{case}.npz") as temporary:
            np.savez_compressed(temporary, unsure=unsure, second=found.second)
        drawn = strokes >= 0
        agreement = float((found.labels[drawn] == strokes[drawn]).mean()) if drawn.any() else None
        quality = found.quality
        about = {
            "certainty": round(quality.certainty, 4),
            "expected_dice": round(quality.expected_dice, 4),
            "agreement": agreement,
            "unsure": [round(u / math.log(labels.count), 4) for u in quality.slice_entropy],
            "time": time.time(),
        }
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


def _escaped(case: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in case)
