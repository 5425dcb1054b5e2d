"""Paired tests of runs on the cases they share."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats

from pclmix.evaluate import Summary

AVERAGE = "Avg"


def case_values(summary: Summary, column: str, measure: str) -> dict[str, float]:
    """One number per case: of a class, or for AVERAGE the mean of the case's classes that are not NaN."""
    values = summary.values(measure)
    if column == AVERAGE:
        kept = ~np.isnan(values)
        counts = kept.sum(axis=1)
        line = np.where(counts > 0, np.where(kept, values, 0).sum(axis=1) / np.maximum(counts, 1), np.nan)
    else:
        line = values[:, summary.names.index(column)]
    return {entry.case: float(value) for entry, value in zip(summary.cases, line, strict=True)}


def paired_test(first: dict[str, float], second: dict[str, float]) -> float:
    """Two-sided p of Wilcoxon's signed-rank test over shared cases; 1 where nothing differs, NaN without pairs."""
    pairs = [(first[case], second[case]) for case in sorted(set(first) & set(second))]
    difference = np.array([a - b for a, b in pairs if not (math.isnan(a) or math.isnan(b))])
    if not difference.size:
        return math.nan
    if not difference.any():
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ties among few cases: scipy then takes the normal approximation, and says so
        return float(stats.wilcoxon(difference, zero_method="wilcox").pvalue)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction; NaN stays NaN and does not count as a test.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    values = np.asarray(p, dtype=np.float64)
    out: npt.NDArray[np.float64] = np.full(values.shape, np.nan)
    tested = np.flatnonzero(~np.isnan(values))
    order = tested[np.argsort(values[tested], kind="stable")]
    scaled = values[order] * np.arange(len(order), 0, -1)
    out[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return [float(v) for v in out]
