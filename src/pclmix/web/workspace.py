"""One dataset as the workbench sees it: its folder is the whole world, .pclmix in it is the workbench's own corner."""

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

CORNER = ".pclmix"
_MOST_CLASSES = 120  # strokes and predictions share the 255 colours of one layer of the viewer


class OutsideError(PclmixError):
    """A path that leaves the dataset folder."""


class UnknownError(PclmixError):
    """A case, run or file that is not there."""


class Workspace:
    """Paths of a dataset, none of which leads outside its folder, and the list of cases as last read."""

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
        """Read dataset.json and the list of cases again."""
        self.dataset = Dataset.open(self.root)
        return self.dataset

    def case(self, name: str) -> str:
        """`name`, if it is a case: whatever else a request asks for does not exist."""
        if name not in self.dataset.cases and name not in self.refresh().cases:
            raise UnknownError(f"there is no case '{name[:100]}' in this dataset")
        return name

    def inside(self, path: Path) -> Path:
        """`path`, refused where it, or a link on the way to it, leads out of the dataset folder."""
        if not path.resolve().is_relative_to(self.root):
            raise OutsideError(
                f"{path.name} leads outside the dataset folder; put a copy of it there instead of a link"
            )
        return path

    def corner(self, *parts: str) -> Path:
        """A path in the workbench's own folder."""
        return self.inside(self.root.joinpath(CORNER, *parts))

    def image_paths(self, case: str) -> list[Path]:
        return [self.inside(path) for path in self.dataset.image_paths(self.case(case))]

    def scribble_path(self, case: str) -> Path:
        return self.inside(self.dataset.scribble_path(self.case(case)))

    def complete(self) -> None:
        """Give cases without a label file an empty one and correct numTraining: what training asks of a dataset."""
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
        """A dataset without a case takes the file ending and the number of channels of its first image."""
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
        """Write a label file where there is none; one that somebody saves at this moment is kept."""
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
                if path.exists():  # a file system without links
                    return False
                os.replace(made, path)
        return True

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """An empty folder inside the dataset that is gone afterwards."""
        top = self.corner("incoming")
        top.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=top))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def make_dataset(root: Path, classes: list[str]) -> None:
    """An empty dataset of one channel, to be filled by dropping images on the page."""
    refuse_existing(root)
    names = [name.strip() for name in classes if name.strip() not in ("", "background", "ignore")]
    if not names:
        raise PclmixError("--classes needs the names of what will be drawn, such as --classes RV,Myo,LV")
    if len(set(names)) != len(names):
        raise PclmixError(f"--classes {','.join(names)}: each name may stand there once")
    for folder in (IMAGES, SCRIBBLES):
        try:
            (root / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PclmixError(f"cannot write {root}: {error.strerror}; choose a folder you may write to") from error
    labels = Labels(("background", *names), len(names) + 1)
    write_dataset_json(root, channels=["image"], labels=labels, ending=".nii.gz", cases=0, name=root.resolve().name)


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a full disk or an exhausted quota."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def token_of(path: Path) -> str:
    """What changes whenever a file is written: a version that outlives the server and notices other programs."""
    with suppress(OSError):
        stat = path.stat()
        return f"{stat.st_mtime_ns:x}-{stat.st_size:x}-{stat.st_ino:x}"
    return "none"
