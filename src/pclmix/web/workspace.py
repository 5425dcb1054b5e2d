"""One dataset as the workbench sees it: its folder is the whole world, .pclmix in it is the workbench's own corner."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from pclmix.data.dataset import IMAGES, SCRIBBLES, Dataset, write_dataset_json
from pclmix.data.volume import write_labels
from pclmix.errors import PclmixError
from pclmix.files import read_json, refuse_existing, write_json
from pclmix.labels import IGNORE, Labels

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
                blank = dataset.labels.encode(np.full(geometry.shape, IGNORE, np.int16))
                write_labels(path, blank, geometry, dataset.labels.names)
        if dataset.num_training != len(dataset.cases):
            where = self.root / "dataset.json"
            write_json(where, {**read_json(where), "numTraining": len(dataset.cases)})
            self.refresh()


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


def token_of(path: Path) -> str:
    """What changes whenever a file is written: a version that outlives the server and notices other programs."""
    with suppress(OSError):
        stat = path.stat()
        return f"{stat.st_mtime_ns:x}-{stat.st_size:x}-{stat.st_ino:x}"
    return "none"
