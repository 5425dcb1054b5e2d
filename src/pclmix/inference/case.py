"""One case of many: read and prepared, through the network, written in every format asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pclmix.errors import PclmixError
from pclmix.inference.inputs import Job
from pclmix.inference.predictor import TTA, Array, Predictor
from pclmix.inference.uncertainty import FOLDER, Examined, examine, write_quality
from pclmix.io import dicom, nrrd
from pclmix.io.volume import Geometry, stem_of, write_map
from pclmix.labels import Labels

_PREPARED = 2**26  # bytes of prepared slices that a volume may have waiting; larger ones are prepared as they go
Also = Literal["slicer", "dicom"]


@dataclass(frozen=True)
class Choices:
    """What is written for each case, and how it is predicted."""

    tta: TTA = "none"
    largest_component: bool = False
    uncertainty: bool = False
    also: tuple[Also, ...] = ()


@dataclass(frozen=True)
class Read:
    """A case that was read: prepared slices in batches, and the grid of its label map."""

    batches: Iterable[Array]
    geometry: Geometry


@dataclass(frozen=True)
class Found:
    """A case that was predicted."""

    labels: Array
    examined: Examined | None
    geometry: Geometry


class CaseWork:
    """The three steps of a case. Different cases may be in different steps at once; the network takes one at a time."""

    def __init__(self, predictor: Predictor, choices: Choices) -> None:
        self.predictor, self.choices = predictor, choices

    def read(self, job: Job) -> Read:
        array, geometry = self.predictor.read(job.images)
        batches = self.predictor.batches(array)
        height, width = self.predictor.about.size
        small = 4 * len(array) * geometry.shape[0] * height * width <= _PREPARED
        return Read(list(batches) if small else batches, geometry)

    def predict(self, case: Read) -> Found:
        size, tta = (case.geometry.shape[1], case.geometry.shape[2]), self.choices.tta
        if not self.choices.uncertainty:
            return Found(self.predictor.label(case.batches, size, tta), None, case.geometry)
        examined = examine(self.predictor.uncertain_batches(case.batches, size, tta))
        return Found(examined.labels, examined, case.geometry)

    def write(self, job: Job, found: Found) -> None:
        if found.examined is not None:
            write_map(map_path(job), found.examined.entropy, found.geometry, "entropy of the prediction")
            write_quality(job.out.parent, job.case, found.examined.quality)
        labels = self.predictor.largest(found.labels) if self.choices.largest_component else found.labels
        for kind in self.choices.also:
            _write_also(kind, job, labels, found.geometry, self.predictor.about.labels)
        # Last: a case counts as done when its labels are there.
        self.predictor.write(job.out, labels, found.geometry)


def is_done(job: Job, choices: Choices) -> bool:
    wanted = [job.out, *([map_path(job)] if choices.uncertainty else []), *(_also_path(k, job) for k in choices.also)]
    return all(path.exists() for path in wanted)


def map_path(job: Job) -> Path:
    """OUT/uncertainty/CASE.nii.gz, also for pictures: their formats hold no real numbers."""
    return job.out.parent / FOLDER / f"{job.case}.nii.gz"


def _also_path(kind: Also, job: Job) -> Path:
    return job.out.with_name(f"{stem_of(job.out)}{nrrd.ENDING if kind == 'slicer' else dicom.ENDING}")


def _write_also(kind: Also, job: Job, labels: Array, geometry: Geometry, classes: Labels) -> None:
    path = _also_path(kind, job)
    if kind == "slicer":
        nrrd.write_segmentation(path, labels, geometry, classes)
    elif not job.images[0].is_dir():
        raise PclmixError(f"{job.images[0]} is not a DICOM series, which --dicom-seg needs")
    else:
        dicom.write_segmentation(path, labels, dicom.read_series(job.images[0]), classes)
