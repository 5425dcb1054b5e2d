"""Files of one dataset: paths that stay inside its folder, progress of runs, stored predictions."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from glob import escape
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, FiniteFloat

from pclmix.config import Config, planned_steps
from pclmix.data.dataset import IMAGES, SCRIBBLES, Dataset, write_dataset_json
from pclmix.errors import PclmixError, checked, read_yaml
from pclmix.inference.uncertainty import Examined
from pclmix.io.files import atomic_path, read_json, refuse_existing, write_json
from pclmix.io.volume import Geometry, read_labels, write_labels
from pclmix.labels import IGNORE, IntArray, Labels

INTERNAL = ".pclmix"
_MOST_CLASSES = 120  # strokes and predictions share one colour table of 255 entries in the viewer


class OutsideError(PclmixError):
    """A path outside the dataset folder."""


class UnknownError(PclmixError):
    """A case, run or file that does not exist."""


class Workspace:
    """A dataset with checked paths, and its list of cases as last read."""

    def __init__(self, root: Path) -> None:
        self.dataset = Dataset.open(root)
        self.root = self.dataset.root.resolve()
        labels = self.dataset.labels
        if labels.ignore is None:
            raise PclmixError(
                f"{self.root / 'dataset.json'}: 'labels' has no \"ignore\", the value of pixels without a stroke; "
                f'add "ignore": {labels.count}'
            )
        if labels.count > _MOST_CLASSES:
            raise PclmixError(f"{self.root}: {labels.count} classes; the workbench draws at most {_MOST_CLASSES}")

    def refresh(self) -> Dataset:
        """Reload dataset.json and the list of cases."""
        self.dataset = Dataset.open(self.root)
        return self.dataset

    def case(self, name: str) -> str:
        """Return `name` if it is a case; raise UnknownError for anything else."""
        if name not in self.dataset.cases and name not in self.refresh().cases:
            raise UnknownError(f"there is no case '{name[:100]}' in this dataset")
        return name

    def inside(self, path: Path) -> Path:
        """Return `path`; raise OutsideError if it, or a link on the way, leads out of the dataset folder."""
        if not path.resolve().is_relative_to(self.root):
            raise OutsideError(f"{path.name} is outside the dataset folder; copy the file there instead of linking it")
        return path

    def internal(self, *parts: str) -> Path:
        """A path in DATASET/.pclmix."""
        return self.inside(self.root.joinpath(INTERNAL, *parts))

    def image_paths(self, case: str) -> list[Path]:
        return [self.inside(path) for path in self.dataset.image_paths(self.case(case))]

    def scribble_path(self, case: str) -> Path:
        return self.inside(self.dataset.scribble_path(self.case(case)))

    def complete(self) -> None:
        """Create missing label files and correct numTraining, as training requires."""
        dataset = self.refresh()
        for case in dataset.cases:
            path = self.scribble_path(case)
            if not path.exists():
                geometry = dataset.read_image(case).geometry
                self.add_labels(path, np.full(geometry.shape, IGNORE, np.int16), geometry)
        if dataset.num_training != len(dataset.cases):
            where = self.root / "dataset.json"
            write_json(where, {**read_json(where), "numTraining": len(dataset.cases)})
            self.refresh()

    def adopt(self, ending: str, channels: int) -> None:
        """Set file ending and channels of a dataset without cases from its first image."""
        dataset = self.refresh()
        names = dataset.channels
        if dataset.cases or (dataset.ending == ending and len(names) == channels):
            return
        if len(names) != channels:
            coloured = channels == 3 and not ending.startswith(".nii")
            names = ("red", "green", "blue") if coloured else tuple(f"image {k}" for k in range(channels))
        where = self.root / "dataset.json"
        table = {str(k): name for k, name in enumerate(names)}
        write_json(where, {**read_json(where), "file_ending": ending, "channel_names": table})
        self.refresh()

    def add_labels(self, path: Path, array: IntArray, geometry: Geometry) -> bool:
        """Write a label file unless it exists; a file saved concurrently is kept."""
        labels = self.dataset.labels
        with self.incoming() as folder:
            made = folder / path.name
            write_labels(made, labels.encode(array), geometry, labels.names)
            try:
                os.link(made, path)
            except FileExistsError:
                return False
            except OSError as error:
                if is_full(error):
                    raise
                if path.exists():  # file system without hard links
                    return False
                os.replace(made, path)
        return True

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """A temporary folder inside the dataset."""
        top = self.internal("incoming")
        top.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=top))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def make_dataset(root: Path, classes: list[str]) -> None:
    """Create an empty dataset; images are added on the page."""
    refuse_existing(root)
    names = [name.strip() for name in classes if name.strip() not in ("", "background", "ignore")]
    if not names:
        raise PclmixError("--classes needs at least one class name, such as --classes RV,Myo,LV")
    if len(set(names)) != len(names):
        raise PclmixError(f"--classes {','.join(names)}: class names must be unique")
    for folder in (IMAGES, SCRIBBLES):
        try:
            (root / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PclmixError(f"cannot write {root}: {error.strerror}; choose a writable folder") from error
    labels = Labels(("background", *names), len(names) + 1)
    write_dataset_json(root, channels=["image"], labels=labels, ending=".nii.gz", cases=0, name=root.resolve().name)


def is_denied(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is a missing permission or a read-only file system."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return True
        error = error.__cause__
    return False


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is a full disk or an exceeded quota."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def token_of(path: Path) -> str:
    """A token that changes with every write, also by other programs, and survives a restart of the server."""
    with suppress(OSError):
        stat = path.stat()
        return f"{stat.st_mtime_ns:x}-{stat.st_size:x}-{stat.st_ino:x}"
    return "none"


Array = npt.NDArray[Any]
_POINTS = 200  # of the loss curve sent to the page


def training(run: Path, since: float | None) -> dict[str, Any]:
    """Phase, step, fraction done, seconds left and loss curve of a run folder, read while training writes it.

    `since` is the start time of the job that trains it, or None. The phase is "preparing" until the training loop
    starts, then "training", and "finishing" once the budget is spent, while checkpoint and figures are written.
    """
    lines = _metrics(run / "metrics.jsonl")
    about, config = read_progress(run), read_config(run)
    step = max(about.step, lines[-1]["step"] if lines else 0)
    budget = None if config is None else config.engine.seconds
    begun = (run / "run.json").stat().st_mtime if (run / "run.json").is_file() else 0.0  # written when the loop starts
    running = since is not None and begun >= since
    elapsed = time.time() - begun if running else 0.0
    first = about.step if running else step
    left: float | None
    if budget:
        share = (about.seconds + elapsed) / budget
        left = budget - about.seconds - elapsed
        over = share >= 1
    else:
        total = 1 if config is None else planned_steps(config.model_dump())
        share = step / total
        left = elapsed / (step - first) * (total - step) if step > first else None
        over = step + (1 if config is None else config.engine.log_every) > total  # the last steps are not logged
    phase = "" if since is None else "preparing" if not running else "finishing" if over else "training"
    thin = lines[:: max(1, -(-len(lines) // _POINTS))]
    curve = [[line["step"], round(line["loss"], 4)] for line in thin if "loss" in line]
    shown = min(1.0, share) if begun else 0.0
    left = None if left is None else max(0.0, left)
    return {"phase": phase, "step": step, "share": shown, "left": left, "curve": curve}


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; the last may be incomplete."""
    found = []
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                content = json.loads(line)
                if isinstance(content, dict) and type(content.get("step")) is int and _is_loss(content.get("loss")):
                    found.append(content)
    return found


def _is_loss(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and -math.inf < value < math.inf)


@dataclass(frozen=True)
class Progress:
    """run.json of a training."""

    step: Annotated[int, Field(ge=0)] = 0
    seconds: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    status: str | None = None


def read_progress(run: Path) -> Progress:
    """The progress of a run; the defaults if it has not begun or the file is damaged."""
    with suppress(PclmixError):
        return checked(Progress, read_json(run / "run.json"), run)
    return Progress()


def read_config(run: Path) -> Config | None:
    """The settings of a run; None if it has not begun or the file is damaged."""
    with suppress(PclmixError, OSError, UnicodeDecodeError):
        return checked(Config, read_yaml((run / "config.yaml").read_text(encoding="utf-8"), str(run)), run)
    return None


@dataclass(frozen=True)
class Figures:
    """The figures of a prediction, as in the list of cases."""

    certainty: FiniteFloat
    expected_dice: FiniteFloat
    agreement: FiniteFloat | None
    unsure: list[FiniteFloat]
    time: FiniteFloat  #: seconds since the epoch


def entropy_bytes(entropy: Array, classes: int) -> Array:
    """Entropy in steps of ln K / 255."""
    found: Array = np.clip(np.rint(entropy * (255 / math.log(classes))), 0, 255).astype(np.uint8)
    return found


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
        unsure = entropy_bytes(found.entropy, labels.count)
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
                about = checked(Figures, read_json(self.workspace.inside(path)), path)
            except PclmixError:
                continue
            found.append({**asdict(about), "run": path.parent.name})
        return sorted(found, key=lambda about: about["time"], reverse=True)

    def labels(self, case: str, back: int = 0) -> tuple[Array, Geometry]:
        """The label map of a case, `back` predictions before the newest."""
        path = self._path(case, ".nii.gz", back)
        array, geometry = read_labels(path)
        if int(array.min()) < 0 or int(array.max()) >= self.workspace.dataset.labels.count:
            raise PclmixError(f"{path.name} has values that are no class of this dataset; predict the case again")
        return array, geometry

    def unsure(self, case: str) -> tuple[Array, Array]:
        """Entropy in bytes and second most likely class of the newest prediction, each (Z, H, W)."""
        path = self._path(case, ".npz", 0)
        try:
            with np.load(path, allow_pickle=False) as content:
                maps = content["unsure"], content["second"]
        except Exception as error:  # damaged archives raise many types of errors
            raise PclmixError(f"{path.name} is damaged ({error}); predict the case again") from error
        if any(one.dtype != np.uint8 or one.ndim != 3 or one.shape != maps[0].shape for one in maps):
            raise PclmixError(f"{path.name} is damaged; predict the case again")
        return maps

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
