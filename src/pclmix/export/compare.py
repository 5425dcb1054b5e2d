"""Compare an exported model with the original on real slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pclmix.export.samples import Sample
from pclmix.inference.predictor import Predictor
from pclmix.metrics.functional import overlap

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
        """Whether the export is close enough to replace the original."""
        if self.dice_change is not None and abs(self.dice_change) > DICE_POINTS:
            return False
        return 1 - self.argmax_agreement <= DISAGREEMENT[precision]

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
