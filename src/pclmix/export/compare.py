"""Compare an exported model with the original on real slices."""

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
from pclmix.inference.predictor import About, Predictor
from pclmix.metrics.functional import overlap
from pclmix.synth.phantom import make_phantom

SLICES = 12  #: slices per volume at most, evenly spread


@dataclass(frozen=True)
class Sample:
    """Slices of one image, (C, Z, H, W), with dense masks (Z, H, W) if known."""

    case: str
    image: npt.NDArray[Any]
    reference: npt.NDArray[Any] | None


def find_samples(about: About, source: Path | None, count: int = 16) -> list[Sample]:
    """`count` images of `source` (an image, a folder or a dataset), by default of the phantom.

    Of the model's training dataset only training cases are used, never the test fold.
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


Array = npt.NDArray[Any]
#: Largest share of pixels whose label may differ, by precision.
DISAGREEMENT = {"fp32": 1e-4, "fp16": 5e-3, "int8": 5e-2}
DICE_POINTS = 0.2  #: largest change of the mean Dice, in points, where dense masks are known


@dataclass(frozen=True)
class Difference:
    """Differences between export and original over some slices."""

    images: tuple[str, ...]
    slices: int
    max_logit_difference: float
    logit_range: float  #: largest minus smallest logit of the original, to judge the difference by
    argmax_agreement: float  #: share of pixels with one label in both
    dice_between: float  #: mean over classes of the Dice of the export's labels with the original's, 0 to 1
    dice_original: float | None  #: mean Dice with the dense masks, 0 to 1, pooled over the slices that have one
    dice_export: float | None

    @property
    def dice_change(self) -> float | None:
        """Points (hundredths) of Dice gained by the export; None where no dense mask is known."""
        if self.dice_original is None or self.dice_export is None:
            return None
        return 100 * (self.dice_export - self.dice_original)

    def acceptable(self, precision: str) -> bool:
        """Whether the differences are within the limits."""
        if self.dice_change is not None and abs(self.dice_change) > DICE_POINTS:
            return False
        return 1 - self.argmax_agreement <= DISAGREEMENT[precision]

    def rows(self) -> dict[str, str]:
        """The figures for a model card."""
        change = self.dice_change
        return {
            "compared with the original on": f"{self.slices} slices of {len(self.images)} images",
            "labels as the original": f"{100 * self.argmax_agreement:.3f} %",
        } | ({} if change is None else {"change of Dice": f"{change:+.2f} points"})

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "images": list(self.images), "dice_change_points": self.dice_change}


def compare(original: Predictor, export: Predictor, samples: Sequence[Sample]) -> Difference:
    """Compare logits and labels at the images' own size, one image at a time."""
    largest, low, high, same, pixels = 0.0, np.inf, -np.inf, 0, 0
    count = original.about.labels.count
    between, first, second = (np.zeros((2, count)) for _ in range(3))
    known = any(sample.reference is not None for sample in samples)
    for sample in samples:
        a, b = original.logits(sample.image), export.logits(sample.image)
        largest = max(largest, float(np.abs(a - b).max()))
        low, high = min(low, float(a.min())), max(high, float(a.max()))
        labels_a, labels_b = a.argmax(1), b.argmax(1)
        same += int((labels_a == labels_b).sum())
        pixels += labels_a.size
        between += overlap(labels_b, labels_a, count)
        if sample.reference is not None:
            first += overlap(labels_a, sample.reference, count)
            second += overlap(labels_b, sample.reference, count)
    return Difference(
        tuple(sample.case for sample in samples),
        sum(sample.image.shape[1] for sample in samples),
        largest,
        high - low,
        same / pixels,
        pooled_dice(between),
        pooled_dice(first) if known else None,
        pooled_dice(second) if known else None,
    )


def pooled_dice(counts: Array) -> float:
    """Mean over the foreground classes that occur; 1 if none does, since both are empty."""
    shared, sizes = counts[:, 1:]
    there = sizes > 0
    return float((shared[there] / sizes[there]).mean()) if there.any() else 1.0
