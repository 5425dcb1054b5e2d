"""Paths of one dataset: nothing outside its folder is accessed; internal files are in DATASET/.pclmix."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from pclmix.data.dataset import IMAGES, SCRIBBLES, Dataset, write_dataset_json
from pclmix.errors import PclmixError
from pclmix.io.files import read_json, refuse_existing, write_json
from pclmix.io.volume import Geometry, write_labels
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
