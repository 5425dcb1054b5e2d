"""Paired bootstrap, Wilcoxon's test and Holm's correction."""

import math

import numpy as np
import pytest
from scipy import stats

from pclmix.errors import PclmixError
from pclmix.metrics import Summary
from pclmix.metrics.comparison import compare_pair, holm, paired_bootstrap, wilcoxon
from pclmix.metrics.functional import Scores
from pclmix.metrics.summary import CaseScores


def test_bootstrap_draws_whole_patients():
    rng = np.random.default_rng(1)
    first, second = rng.normal(1, 1, 40), rng.normal(0, 1, 40)
    once = paired_bootstrap(first, second, [str(i) for i in range(40)])
    twice = paired_bootstrap(np.repeat(first, 2), np.repeat(second, 2), [str(i // 2) for i in range(80)])
    assert (once.low, once.high) == pytest.approx((twice.low, twice.high))
    assert once.difference == pytest.approx((first - second).mean())
    half_width = 1.96 * (first - second).std() / math.sqrt(40)
    assert once.high - once.low == pytest.approx(2 * half_width, rel=0.1)


def test_bootstrap_leaves_nan_pairs_out():
    first, second = np.array([1.0, math.nan, 3.0]), np.array([0.0, 1.0, math.nan])
    found = paired_bootstrap(first, second, ["a", "b", "c"])
    assert (found.n, found.left_out, found.difference) == (1, 2, 1)
    assert math.isnan(found.low)
    assert math.isnan(paired_bootstrap(second[2:], first[2:], ["a"]).difference)


def test_wilcoxon_takes_shared_cases():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.3, 1, 20), rng.normal(0, 1, 20)
    first = {f"c{i}": v for i, v in enumerate(a)} | {"alone": 9.0, "nan": math.nan}
    second = {f"c{i}": v for i, v in enumerate(b)} | {"nan": 1.0}
    assert wilcoxon(first, second) == pytest.approx(stats.wilcoxon(a, b).pvalue)
    assert wilcoxon(first, first) == 1
    assert math.isnan(wilcoxon(first, {"other": 1.0}))


def test_holm():
    assert holm([0.01, math.nan, 0.04, 0.03]) == pytest.approx([0.03, math.nan, 0.06, 0.06], nan_ok=True)
    assert holm([0.9, 0.8]) == [1, 1]
    assert holm([]) == []


def test_sets_in_different_units_are_not_compared():
    cases = (CaseScores("a", {"x": Scores("scored", 0.9, 2.0, 2.0, 1.0, 1.0, 1.0)}),)
    mm, px = (Summary(("x",), cases, unit=unit) for unit in ("mm", "px"))
    assert compare_pair(mm, mm, "same").mean["HD95"].difference == 0
    with pytest.raises(PclmixError, match=r"other.*px.*mm"):
        compare_pair(mm, px, "other")
