"""Real slices to calibrate an export on and to compare it with the original on."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pclmix.data.dataset import Dataset
from pclmix.inference.inputs import find_jobs, read_images
from pclmix.inference.predictor import About
from pclmix.synth.phantom import make_phantom

SLICES = 12  #: of one volume at most, evenly spread


@dataclass(frozen=True)
class Sample:
    """Slices of one image, (C, Z, H, W), with their dense masks (Z, H, W) where they are known."""

    case: str
    image: npt.NDArray[Any]
    reference: npt.NDArray[Any] | None


def find_samples(about: About, source: Path | None, count: int = 16) -> list[Sample]:
    """`count` images of `source` (an image, a folder or a dataset), by default of the phantom.

    Of the dataset a model was trained on only its training cases are taken: nothing is chosen on a test fold.
    """
    if source is not None:
        return _read(about, Path(source), count)
    with tempfile.TemporaryDirectory() as folder:
        make_phantom(Path(folder) / "phantom", 2)
        return [_with_channels(sample, len(about.channels)) for sample in _read_phantom(about, Path(folder), count)]


def _read(about: About, source: Path, count: int) -> list[Sample]:
    jobs = find_jobs(source, source / "unused", channels=about.channels, labels=about.labels)
    dataset = Dataset.open(source) if (source / "dataset.json").is_file() else None
    if dataset is not None and dataset.name == about.dataset:
        jobs = [job for job in jobs if job.case in about.trained_on] or jobs
    samples = []
    for job in _spread(jobs, count):
        image = read_images(job.images, len(about.channels)).array
        has = dataset is not None and dataset.has_reference(job.case)
        reference = dataset.read_reference(job.case)[0] if dataset is not None and has else None
        samples.append(_thin(Sample(job.case, image, reference)))
    return samples


def _read_phantom(about: About, folder: Path, count: int) -> list[Sample]:
    dataset = Dataset.open(folder / "phantom")
    comparable = dataset.labels.names == about.labels.names
    samples = []
    for case in dataset.cases[:count]:
        reference = dataset.read_reference(case)[0] if comparable else None
        samples.append(_thin(Sample(case, dataset.read_image(case).array, reference)))
    return samples


def _with_channels(sample: Sample, channels: int) -> Sample:
    return Sample(sample.case, np.repeat(sample.image, channels, axis=0), sample.reference)


def _thin(sample: Sample) -> Sample:
    chosen = _spread(range(sample.image.shape[1]), SLICES)
    reference = None if sample.reference is None else sample.reference[chosen]
    return Sample(sample.case, sample.image[:, chosen], reference)


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly spread, first and last among them."""
    if len(items) <= count:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, count).round().astype(int)]
