"""Dice, HD95 and ASSD of arrays: numbers by hand, slow definitions, distance transforms."""

import math
from pathlib import Path

import numpy as np
import pytest
import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from pclmix import metrics
from pclmix.errors import PclmixError
from pclmix.io.volume import read_labels
from pclmix.metrics import functional

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
    ours = functional.hd95(a, b, spacing), functional.assd(a, b, spacing)
    if not a.any() or not b.any():
        assert all(math.isnan(v) for v in ours)
        return
    assert ours == pytest.approx((slow.hd95(a, b, spacing), slow.assd(a, b, spacing)), abs=1e-6)
    assert functional.hd95(b, a, spacing) == pytest.approx(ours[0], abs=1e-9)


@pytest.mark.skipif(not RAW.is_dir(), reason="needs ACDC in ../shared/acdc/raw")
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
        assert functional.hd95(moved, reference, spacing) == pytest.approx(
            np.percentile(np.hstack([there, back]), 95), abs=1e-6
        )
        assert functional.assd(moved, reference, spacing) == pytest.approx((there.mean() + back.mean()) / 2, abs=1e-6)
        half = np.ascontiguousarray(moved[:3]), np.ascontiguousarray(reference[:3])
        if half[1].any():
            assert functional.hd95(*half, spacing) == pytest.approx(slow.hd95(*half, spacing), abs=1e-6)


def _surface(mask):
    return mask ^ ndimage.binary_erosion(mask, ndimage.generate_binary_structure(mask.ndim, 1))


def test_hand_numbers():
    a = np.zeros((1, 1, 10), bool)
    b = a.copy()
    a[0, 0, 2:4] = True  # 2, 3
    b[0, 0, 3:7] = True  # 3, 4, 5, 6
    spacing = (5.0, 1.0, 2.0)
    assert functional.dice(a, b) == pytest.approx(2 * 1 / 6)
    # Only the axis of length ten has a surface, its ends: 2 -> 3 is 2 mm, 3 is shared, 6 -> 3 is 6 mm.
    there, back = functional.surface_distances(a, b, spacing)
    assert sorted(there) == [0, 2]
    assert sorted(back) == [0, 6]
    assert functional.hd95(a, b, spacing) == pytest.approx(np.percentile([0, 2, 0, 6], 95))
    assert functional.assd(a, b, spacing) == pytest.approx((1 + 3) / 2)
    assert functional.volume_ml(a, spacing) == pytest.approx(2 * 10 / 1000)


def test_surface_is_the_shell_and_includes_the_image_border():
    block = np.zeros((5, 5, 5), bool)
    block[1:4, 1:4, 1:4] = True
    assert len(functional.surface_points(block)) == 26
    assert len(functional.surface_points(np.ones((3, 3, 3), bool))) == 26


def test_equal_masks():
    mask = np.random.default_rng(0).random((3, 9, 9)) < 0.4
    scores = functional.score(mask, mask, (8, 1.5, 1.5))
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
    scores = functional.score(some if predicted else none, some if present else none, (1, 1, 1))
    assert scores.status == status
    assert (scores.dice, scores.hd95, scores.hd95_50) == pytest.approx((dice, hd95, hd95_50), nan_ok=True)
    assert math.isnan(scores.assd)


def discs(*radii, size=160):
    """Discs around one centre, (H, W)."""
    y, x = np.mgrid[:size, :size] - size // 2
    return [np.hypot(y, x) <= radius for radius in radii]


def test_discs_of_radius_50_and_60_are_ten_pixels_apart():
    """Between concentric circles every distance is the difference of the radii, up to the pixel grid."""
    small, large = discs(50, 60)
    area = 2 * small.sum() / (small.sum() + large.sum())
    for a, b in ((small, large), (small[None], large[None]), (small[:, None], large[:, None])):
        assert metrics.hd95(a, b) == pytest.approx(10, abs=0.1)
        assert metrics.assd(a, b) == pytest.approx(9.8, abs=0.1)
        assert metrics.dice(a, b) == pytest.approx(area)
    assert metrics.hd95(small, large, spacing=0.5) == pytest.approx(5, abs=0.05)
    assert metrics.hd95(small[None], large[None], spacing=(8, 0.5, 0.5)) == pytest.approx(5, abs=0.05)


def test_pictures_equal_the_distance_transform():
    rng = np.random.default_rng(0)
    for _ in range(5):
        a, b = (ndimage.gaussian_filter(rng.normal(size=(60, 45)), 3) > 0.03 for _ in range(2))
        there = ndimage.distance_transform_edt(~_surface(b), sampling=(0.7, 1.3))[_surface(a)]
        back = ndimage.distance_transform_edt(~_surface(a), sampling=(0.7, 1.3))[_surface(b)]
        hd95, assd = np.percentile(np.hstack([there, back]), 95), (there.mean() + back.mean()) / 2
        assert metrics.hd95(a, b, (0.7, 1.3)) == pytest.approx(hd95)
        assert metrics.hd95(a[None], b[None], (9, 0.7, 1.3)) == pytest.approx(hd95)
        assert metrics.assd(a[None], b[None], (9, 0.7, 1.3)) == pytest.approx(assd)


def test_mask_in_one_slice_of_a_volume():
    """The axis has length three: a mask in one slice is surface throughout."""
    volume = np.zeros((3, 9, 9), bool)
    volume[1] = discs(3, size=9)[0]
    assert len(functional.surface_points(volume)) == volume.sum()
    assert len(functional.surface_points(volume[1])) < volume.sum()
    assert len(functional.surface_points(np.ones((1, 1, 1), bool))) == 1


def test_masks_of_zeros_and_ones():
    a, b = (mask.astype(kind) for mask, kind in zip(discs(3, 4, size=11), (np.uint8, float), strict=True))
    assert metrics.dice(a, b) == metrics.dice(a > 0, b > 0)
    assert metrics.hd95(a.tolist(), b) == metrics.hd95(a > 0, b > 0)
    assert math.isnan(metrics.dice(a * 0, b * 0))
    assert math.isnan(metrics.assd(a, b * 0))


@pytest.mark.parametrize("function", [metrics.dice, metrics.hd95, metrics.assd])
def test_masks_are_checked(function):
    mask = np.ones((2, 2), bool)
    for bad in (np.ones((2, 3), bool), mask[None], np.ones(2, bool), np.ones((1, 1, 2, 2), bool), mask * 2, mask * 0.5):
        with pytest.raises(PclmixError, match="reference"):
            function(mask, bad)
        with pytest.raises(PclmixError, match="prediction"):
            function(bad, mask)


@pytest.mark.parametrize("spacing", [(1, 1, 1), (1,), 0, (1, -1), float("nan"), (1, float("inf"))])
def test_spacing_is_checked(spacing):
    mask = np.ones((2, 2), bool)
    with pytest.raises(PclmixError, match="spacing"):
        metrics.hd95(mask, mask, spacing)


def test_scores_without_a_spacing_are_in_pixels_and_have_no_volume():
    small, large = discs(50, 60)
    scores = functional.score(small, large, None)
    assert scores.hd95 == metrics.hd95(small, large)
    assert math.isnan(scores.volume_ml)
    assert math.isnan(scores.reference_ml)
    assert functional.score(small & False, large, None).status == "empty prediction"
    assert functional.score(small[None], large[None], (5, 2, 2)).reference_ml == pytest.approx(large.sum() * 20 / 1000)


def test_overlap_is_the_dice_of_each_class():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 4, (2, 20, 20))
    shared, sizes = functional.overlap(a, b, 5)
    assert (shared[:4] / sizes[:4]).tolist() == pytest.approx([metrics.dice(a == k, b == k) for k in range(4)])
    assert (shared[4], sizes[4]) == (0, 0)
