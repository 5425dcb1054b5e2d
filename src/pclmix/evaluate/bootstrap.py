"""How sure a difference between two sets of predictions is: the paired bootstrap over patients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LEVEL, RESAMPLES, SEED = 0.95, 10_000, 0


@dataclass(frozen=True)
class Interval:
    """Mean of first minus second over pairs without NaN, and its percentile interval."""

    difference: float
    low: float
    high: float
    n: int  #: pairs used
    left_out: int  #: pairs with a NaN on either side

    def to_json(self) -> dict[str, float | None]:
        return {key: None if math.isnan(value) else value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Comparison:
    """Differences to another set of predictions: `mean` by measure, `classes` by class name and measure."""

    other: str
    patients: int
    mean: dict[str, Interval]
    classes: dict[str, dict[str, Interval]]

    def to_json(self) -> dict[str, Any]:
        return {
            "other": self.other,
            "patients": self.patients,
            "level": LEVEL,
            "resamples": RESAMPLES,
            "mean": {measure: interval.to_json() for measure, interval in self.mean.items()},
            "classes": {
                name: {measure: interval.to_json() for measure, interval in row.items()}
                for name, row in self.classes.items()
            },
        }


def paired_bootstrap(
    first: npt.NDArray[np.float64],
    second: npt.NDArray[np.float64],
    patients: Sequence[str],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Interval:
    """Interval of mean(first - second), both (N, ...) with `patients` (N,) saying whose row each is.

    Patients are drawn with replacement, each with all of its rows, because two frames of one heart are not two
    independent cases. With one patient, or no pair without NaN, the bounds are NaN.
    """
    if first.shape != second.shape or len(first) != len(patients):
        raise ValueError(f"paired values are needed, got {first.shape}, {second.shape} and {len(patients)} patients")
    difference = (first - second).reshape(len(patients), -1)
    used = ~np.isnan(difference)
    n, left_out = int(used.sum()), int(used.size - used.sum())
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0, left_out)
    _, group = np.unique(np.asarray(patients), return_inverse=True)
    sums = np.bincount(group, np.where(used, difference, 0).sum(axis=1))
    counts = np.bincount(group, used.sum(axis=1))
    sums, counts = sums[counts > 0], counts[counts > 0]
    mean = float(sums.sum() / counts.sum())
    if len(sums) < 2:
        return Interval(mean, math.nan, math.nan, n, left_out)
    draws = np.random.default_rng(seed).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=resamples)
    means = (draws @ sums) / (draws @ counts)
    low, high = np.percentile(means, [50 * (1 - level), 50 * (1 + level)])
    return Interval(mean, float(low), float(high), n, left_out)
