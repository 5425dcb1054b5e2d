"""What training and prediction leave on disk: progress of a run folder, and stored predictions."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from pclmix.config import planned_steps
from pclmix.errors import PclmixError
from pclmix.inference.uncertainty import Examined
from pclmix.io.files import atomic_path, read_json, write_json
from pclmix.io.volume import Geometry, read_labels, write_labels
from pclmix.labels import Labels
from pclmix.web.workspace import UnknownError, Workspace

Array = npt.NDArray[Any]
_POINTS = 200  # of the loss curve sent to the page


def training(run: Path, since: float | None) -> dict[str, Any]:
    """Phase, step, fraction done, seconds left and loss curve of a run folder, read while training writes it.

    `since` is the start time of the job that trains it, or None. The phase is "preparing" until the training loop
    starts, then "training", and "finishing" once the budget is spent, while checkpoint and figures are written.
    """
    lines = _metrics(run / "metrics.jsonl")
    about = read_json(run / "run.json") if (run / "run.json").is_file() else {}
    config = read_yaml(run / "config.yaml")
    engine = config.get("engine", {})
    step = max(int(about.get("step", 0)), lines[-1]["step"] if lines else 0)
    budget, spent = engine.get("seconds"), float(about.get("seconds", 0.0))
    begun = (run / "run.json").stat().st_mtime if about else 0.0  # written when the loop starts
    running = since is not None and begun >= since
    elapsed = time.time() - begun if running else 0.0
    first = int(about.get("step", 0)) if running else step
    left: float | None
    if budget:
        share = (spent + elapsed) / float(budget)
        left = float(budget) - spent - elapsed
        over = share >= 1
    else:
        total = planned_steps(config) if engine else 1
        share = step / total
        left = elapsed / (step - first) * (total - step) if step > first else None
        over = step + int(engine.get("log_every", 1)) > total  # the last steps are not logged
    phase = "" if since is None else "preparing" if not running else "finishing" if over else "training"
    thin = lines[:: max(1, -(-len(lines) // _POINTS))]
    curve = [[line["step"], round(line["loss"], 4)] for line in thin if "loss" in line]
    shown = min(1.0, share) if about else 0.0
    left = None if left is None else max(0.0, left)
    return {"phase": phase, "step": step, "share": shown, "left": left, "curve": curve}


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; the last may be incomplete."""
    found = []
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


class PredictionStore:
    """The predictions of a dataset, by run and case.

    RUN/CASE.nii.gz is the label map; RUN/CASE.npz holds `unsure` (entropy in steps of ln K / 255) and `second` (the
    second most likely class); RUN/CASE.json holds the figures shown in the list of cases.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def folder(self, run: str) -> Path:
        return self.workspace.internal("predictions", run)

    def write(self, run: str, case: str, found: Examined, geometry: Geometry, labels: Labels, strokes: Array) -> None:
        """Store a prediction; the JSON is written last, so that the files it refers to exist."""
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
        """Figures of each prediction of a case, newest first."""
        found = []
        top = self.workspace.internal("predictions")
        for path in top.glob(f"*/{escape(case)}.json") if top.is_dir() else ():
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
        """Entropy in bytes and second most likely class of the newest prediction, each (Z, H, W)."""
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
