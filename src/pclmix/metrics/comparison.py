"""Significance of differences between predictions: paired bootstrap by patient, Wilcoxon's test, Holm's correction."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pclmix.data.dataset import PATIENT_PATTERN, patient_of
from pclmix.errors import PclmixError
from pclmix.metrics.functional import MEASURES

if TYPE_CHECKING:
    from pclmix.metrics.summary import Summary

LEVEL, RESAMPLES, SEED = 0.95, 10_000, 0
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """Mean of first minus second over the pairs without NaN, and its percentile interval."""

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


def compare_pair(first: Summary, second: Summary, other: str, patient_pattern: str = PATIENT_PATTERN) -> Comparison:
    """Differences first minus second over the common cases; `other` names the second."""
    if len(first.names) != len(second.names):
        raise PclmixError(f"{other} has {len(second.names)} classes, not {len(first.names)}; it is another task")
    if first.unit != second.unit:
        raise PclmixError(f"{other} has distances in {second.unit}, {first.prediction} in {first.unit}")
    shared = sorted({entry.case for entry in first.cases} & {entry.case for entry in second.cases})
    if not shared:
        raise PclmixError(f"{other} has no case in common with {first.prediction or 'these predictions'}")
    rows1, rows2 = ([{e.case: i for i, e in enumerate(s.cases)}[case] for case in shared] for s in (first, second))
    patients = [patient_of(case, patient_pattern) for case in shared]
    values = {m: (first.values(m)[rows1], second.values(m)[rows2]) for m in MEASURES}
    return Comparison(
        other,
        len(set(patients)),
        {m: paired_bootstrap(a, b, patients) for m, (a, b) in values.items()},
        {
            name: {m: paired_bootstrap(a[:, k], b[:, k], patients) for m, (a, b) in values.items()}
            for k, name in enumerate(first.names)
        },
    )


def paired_bootstrap(
    first: Values,
    second: Values,
    patients: Sequence[str],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Interval:
    """Interval of mean(first - second), both (N, ...), `patients` (N,) naming the patient of each row.

    Patients are drawn with replacement, each with all of its rows: two frames of one heart are not independent. With
    one patient, or no pair without NaN, the bounds are NaN.
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


def wilcoxon(first: dict[str, float], second: dict[str, float]) -> float:
    """Two-sided p of Wilcoxon's signed-rank test over shared cases; 1 where nothing differs, NaN without pairs."""
    from scipy import stats  # imported here: takes half a second

    pairs = [(first[case], second[case]) for case in sorted(set(first) & set(second))]
    difference = np.array([a - b for a, b in pairs if not (math.isnan(a) or math.isnan(b))])
    if not difference.size:
        return math.nan
    if not difference.any():
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ties among few cases: SciPy switches to the normal approximation and warns
        return float(stats.wilcoxon(difference, zero_method="wilcox").pvalue)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction; NaN stays NaN and does not count as a test.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    values = np.asarray(p, dtype=np.float64)
    out: Values = np.full(values.shape, np.nan)
    tested = np.flatnonzero(~np.isnan(values))
    order = tested[np.argsort(values[tested], kind="stable")]
    scaled = values[order] * np.arange(len(order), 0, -1)
    out[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return [float(v) for v in out]
