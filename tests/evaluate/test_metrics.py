import math
from pathlib import Path

import numpy as np
import pytest
import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from pclmix.data.volume import read_labels
from pclmix.evaluate import metrics

RAW = Path(__file__).parents[2] / "../shared/acdc/raw"


@st.composite
def two_masks(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=2, max_size=3)))
    spacing = tuple(draw(st.lists(st.floats(0.3, 12.0), min_size=len(shape), max_size=len(shape))))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    share = draw(st.sampled_from((0.05, 0.5, 0.95)))
    a, b = rng.random(shape) < share, rng.random(shape) < share
    if draw(st.booleans()):
        a, b = (ndimage.binary_closing(np.pad(m, 2))[(slice(2, -2),) * len(shape)] for m in (a, b))
    return a, b, spacing


@given(two_masks())
@settings(max_examples=150, deadline=None)
def test_distances_equal_the_slow_definition(case):
    a, b, spacing = case
    ours = metrics.hd95(a, b, spacing), metrics.assd(a, b, spacing)
    if not a.any() or not b.any():
        assert all(math.isnan(v) for v in ours)
        return
    assert ours == pytest.approx((slow.hd95(a, b, spacing), slow.assd(a, b, spacing)), abs=1e-6)
    assert metrics.hd95(b, a, spacing) == pytest.approx(ours[0], abs=1e-9)


@pytest.mark.skipif(not RAW.is_dir(), reason="ACDC is not at hand")
@pytest.mark.parametrize("case", ["patient001_frame01", "patient002_frame12"])
def test_distances_equal_the_slow_definition_on_real_masks(case):
    labels, geometry = read_labels(RAW / case.split("_")[0] / f"{case}_gt.nii.gz")
    spacing = geometry.spacing
    assert spacing[0] >= 5  # from pixdim; the affine of these files says 1 mm
    for k in (1, 2, 3):
        reference = labels == k
        moved = np.roll(reference, (0, 3, -2), axis=(0, 1, 2))
        moved[1, 4:6, 4:6] = True  # a stray island, as networks leave them
        there = ndimage.distance_transform_edt(~_surface(reference), sampling=spacing)[_surface(moved)]
        back = ndimage.distance_transform_edt(~_surface(moved), sampling=spacing)[_surface(reference)]
        assert metrics.hd95(moved, reference, spacing) == pytest.approx(
            np.percentile(np.hstack([there, back]), 95), abs=1e-6
        )
        assert metrics.assd(moved, reference, spacing) == pytest.approx((there.mean() + back.mean()) / 2, abs=1e-6)
        half = np.ascontiguousarray(moved[:3]), np.ascontiguousarray(reference[:3])
        if half[1].any():
            assert metrics.hd95(*half, spacing) == pytest.approx(slow.hd95(*half, spacing), abs=1e-6)


def _surface(mask):
    return mask ^ ndimage.binary_erosion(mask, ndimage.generate_binary_structure(mask.ndim, 1))


def test_hand_numbers():
    a = np.zeros((1, 1, 10), bool)
    b = a.copy()
    a[0, 0, 2:4] = True  # 2, 3
    b[0, 0, 3:7] = True  # 3, 4, 5, 6
    spacing = (5.0, 1.0, 2.0)
    assert metrics.dice(a, b) == pytest.approx(2 * 1 / 6)
    # In one row every voxel is surface: 2 -> 3 is 2 mm, 3 is shared, 4, 5, 6 -> 3 are 2, 4, 6 mm.
    there, back = metrics.surface_distances(a, b, spacing)
    assert sorted(there) == [0, 2]
    assert sorted(back) == [0, 2, 4, 6]
    assert metrics.hd95(a, b, spacing) == pytest.approx(np.percentile([0, 2, 0, 2, 4, 6], 95))
    assert metrics.assd(a, b, spacing) == pytest.approx((1 + 3) / 2)
    assert metrics.volume_ml(a, spacing) == pytest.approx(2 * 10 / 1000)


def test_the_surface_of_a_block_is_its_shell_and_the_border_is_surface():
    block = np.zeros((5, 5, 5), bool)
    block[1:4, 1:4, 1:4] = True
    assert len(metrics.surface_points(block)) == 26
    assert len(metrics.surface_points(np.ones((3, 3, 3), bool))) == 26


def test_equal_masks_are_perfect():
    mask = np.random.default_rng(0).random((3, 9, 9)) < 0.4
    scores = metrics.score(mask, mask, (8, 1.5, 1.5))
    assert (scores.dice, scores.hd95, scores.assd, scores.status) == (1, 0, 0, "scored")


@pytest.mark.parametrize(
    ("predicted", "present", "status", "dice", "hd95", "hd95_50"),
    [
        (False, True, "empty prediction", 0, math.nan, 50),
        (True, False, "predicted where absent", 0, math.nan, math.nan),
        (False, False, "absent", math.nan, math.nan, math.nan),
    ],
)
def test_empty_masks(predicted, present, status, dice, hd95, hd95_50):
    some, none = np.ones((2, 3, 3), bool), np.zeros((2, 3, 3), bool)
    scores = metrics.score(some if predicted else none, some if present else none, (1, 1, 1))
    assert scores.status == status
    assert (scores.dice, scores.hd95, scores.hd95_50) == pytest.approx((dice, hd95, hd95_50), nan_ok=True)
    assert math.isnan(scores.assd)


def test_arguments_are_checked():
    mask = np.ones((2, 2), bool)
    with pytest.raises(ValueError, match="one shape"):
        metrics.hd95(mask, np.ones((2, 3), bool), (1, 1))
    with pytest.raises(ValueError, match="boolean"):
        metrics.hd95(mask.astype(int), mask, (1, 1))
    with pytest.raises(ValueError, match="2 positive numbers"):
        metrics.hd95(mask, mask, (1, 1, 1))
