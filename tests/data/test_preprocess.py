"""Preprocessing: intensities, labels at working size, and its inverse in prediction."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import ndimage

from pclmix.data.preprocess import Preprocessing, kept_pixels, normalise, reduce_labels, resize_nearest
from pclmix.labels import IGNORE
from pclmix.synth.scribble import Style, simulate

SIDES = st.tuples(st.integers(1, 20), st.integers(1, 20))


@given(
    arrays(np.int16, st.tuples(st.just(2), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6))),
    st.sampled_from(["slice", "volume"]),
)
@settings(max_examples=60, deadline=None)
def test_intensities_are_scaled_to_one(array: Any, intensity: str) -> None:
    scaled = normalise(array, intensity)
    axes = (2, 3) if intensity == "slice" else (1, 2, 3)
    flat = array.max(axis=axes) == array.min(axis=axes)
    assert (scaled.min(axis=axes) == 0).all()
    np.testing.assert_allclose(scaled.max(axis=axes), np.where(flat, 0.0, 1.0), rtol=1e-6)


@given(
    arrays(
        np.int16, st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), elements=st.integers(IGNORE, 3)
    ),
    SIDES,
    st.sampled_from(["keep", "stretch"]),
)
@settings(max_examples=200, deadline=None)
def test_labels_are_never_interpolated(label: Any, size: tuple[int, int], aspect: Any) -> None:
    resized = Preprocessing(size, aspect=aspect).labels(label)
    assert resized.shape == (len(label), *size)
    assert resized.dtype == label.dtype
    for before, after in zip(label, resized, strict=True):
        assert set(np.unique(after)) <= {*np.unique(before), IGNORE}
        count = len(np.unique(before[before >= 0]))
        frame = Preprocessing(size, aspect=aspect).frame(before.shape)
        if frame.height * frame.width >= count:
            assert set(np.unique(after[after >= 0])) == set(np.unique(before[before >= 0])), "a class vanished"


def test_two_classes_in_one_target_pixel_are_both_kept() -> None:
    label = np.full((1, 9, 8), IGNORE, np.int16)
    label[0, 8, 3:5] = 0, 1
    assert np.unique(reduce_labels(label, (4, 5))).tolist() == [IGNORE, 0, 1]


@given(
    arrays(
        np.int16,
        st.tuples(st.just(1), st.integers(1, 40), st.integers(1, 40)),
        elements=st.sampled_from([-1, -1, -1, 2]),
    ),
    SIDES,
)
@settings(max_examples=100, deadline=None)
def test_strokes_of_one_class_are_all_kept(label: Any, size: tuple[int, int]) -> None:
    reduced = reduce_labels(label, size)
    if (label >= 0).mean() <= 0.5:
        assert kept_pixels(label, reduced, 3)[2] == (label == 2).sum()
    # Pixels without a stroke stay unlabelled.
    assert ((reduced >= 0).sum() > 0) == ((label >= 0).sum() > 0)


def curve(shape: tuple[int, int], seed: int) -> np.ndarray:
    """An 8-connected wandering line, one pixel wide."""
    rng = np.random.default_rng(seed)
    line = np.zeros(shape, bool)
    y, x = shape[0] // 2, 2
    while x < shape[1] - 2:
        line[y, x] = True
        y = int(np.clip(y + rng.integers(-1, 2), 1, shape[0] - 2))
        x += int(rng.random() < 0.7)
    return line


@pytest.mark.parametrize("size", [(64, 64), (100, 77), (256, 200), (512, 530)])
@pytest.mark.parametrize("seed", range(3))
def test_a_line_stays_one_line(size: tuple[int, int], seed: int) -> None:
    label = np.where(curve((512, 534), seed), 1, IGNORE)[None]
    touching = np.ones((3, 3))
    assert ndimage.label(label[0] >= 0, touching)[1] == 1
    reduced = reduce_labels(label, size)
    assert ndimage.label(reduced[0] >= 0, touching)[1] == 1
    assert (reduced >= 0).any(axis=1).sum() >= 0.95 * size[1], "from one side to the other"
    assert (reduced == 1).sum() < 3 * max(size), "still a line"


def test_the_rarer_class_wins_where_two_meet() -> None:
    label = np.full((1, 64, 64), IGNORE)
    label[0, 8, :] = 0  # a long line
    label[0, 9, 8:24] = 1  # a short one right beside it: in the same target pixels
    reduced = reduce_labels(label, (8, 8))[0]
    assert reduced[1].tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    assert kept_pixels(label, reduced[None], 2).tolist() == [48, 16]


def test_regions_keep_all_classes() -> None:
    rng = np.random.default_rng(0)
    label = (ndimage.gaussian_filter(rng.normal(size=(1, 96, 80)), (0, 6, 6)) > 0).astype(np.int16)
    np.testing.assert_array_equal(reduce_labels(label, (40, 36)), resize_nearest(label, (40, 36)))
    label[0, 50, 50] = 2  # a single pixel that sampling at centres misses
    assert not (resize_nearest(label, (12, 12)) == 2).any()
    reduced = reduce_labels(label, (12, 12))
    assert (reduced == 2).sum() == 1
    assert (reduced != resize_nearest(label, (12, 12))).sum() == 1


def test_simulated_strokes_of_a_large_picture_survive_64_pixels() -> None:
    """Sampling at centres keeps 1.6 % of the pixels of such strokes, and classes vanish."""
    y, x = np.mgrid[:512, :640]
    mask = np.zeros((1, 512, 640), np.int16)
    mask[0][np.hypot(y - 200, x - 300) < 90] = 1
    mask[0][np.hypot(y - 420, x - 500) < 14] = 2
    strokes = simulate(mask, Style(), np.random.default_rng(3))
    drawn = np.bincount(strokes[strokes >= 0], minlength=3)
    for side in (64, 128, 256):
        prep = Preprocessing((side, side))
        frame = prep.frame((512, 640))
        inside = reduce_labels(strokes, (frame.height, frame.width))
        kept = kept_pixels(strokes, inside, 3)
        assert (kept / drawn > 0.97).all(), (side, kept, drawn)


def test_reduction_is_fast() -> None:
    rng = np.random.default_rng(0)
    label = np.full((20, 512, 512), IGNORE, np.int16)
    label[rng.random(label.shape) < 0.02] = 1
    label[rng.random(label.shape) < 0.01] = 2
    started = time.perf_counter()
    reduce_labels(label, (128, 128))
    assert time.perf_counter() - started < 2.0, "about 0.05 s on an idle core"


@given(SIDES, SIDES, st.sampled_from(["keep", "stretch"]))
@settings(max_examples=100, deadline=None)
def test_a_frame_lies_inside_and_keeps_the_aspect(shape: Any, size: Any, aspect: Any) -> None:
    frame = Preprocessing(size, aspect=aspect).frame(shape)
    assert frame.top >= 0 <= frame.left
    assert frame.top + frame.height <= size[0]
    assert frame.left + frame.width <= size[1]
    if aspect == "stretch":
        assert (frame.height, frame.width) == size
        return
    assert frame.height == size[0] or frame.width == size[1]
    factor = min(size[0] / shape[0], size[1] / shape[1])
    assert abs(frame.height - shape[0] * factor) < 1
    assert abs(frame.width - shape[1] * factor) < 1
    assert abs(2 * frame.top + frame.height - size[0]) <= 1


@pytest.mark.parametrize("aspect", ["keep", "stretch"])
@pytest.mark.parametrize("shape", [(24, 32), (32, 24), (70, 16), (5, 60)])
def test_prediction_undoes_the_frame(shape: tuple[int, int], aspect: Any) -> None:
    """A smooth picture is resized and restored; padding never enters the result."""
    y, x = np.meshgrid(np.linspace(0, 1, shape[0]), np.linspace(0, 2, shape[1]), indexing="ij")
    picture = (y + x)[None, None]
    prep = Preprocessing((48, 48), aspect=aspect)
    seen = prep.images(picture)
    frame = prep.frame(shape)
    outside = np.ones((48, 48), bool)
    outside[frame.top : frame.top + frame.height, frame.left : frame.left + frame.width] = False
    assert (seen[0, 0][outside] == 0).all()
    disturbed = seen.copy()
    disturbed[0, 0][outside] = 1e6
    back = prep.restored(disturbed, shape)
    # The antialiasing triangle flattens the ends: a pixel of the smaller picture at most.
    np.testing.assert_allclose(back[0, 0], normalise(picture, "slice")[0, 0], atol=0.08)
    rows, columns = prep.restoring_matrices(shape)
    np.testing.assert_allclose(rows @ disturbed[0, 0] @ columns.T, back[0, 0], atol=1e-4)


def test_padding_is_unlabelled() -> None:
    prep = Preprocessing((8, 8))
    labels = prep.labels(np.zeros((1, 4, 8), np.int16))
    assert labels[0, :, 0].tolist() == [IGNORE] * 2 + [0] * 4 + [IGNORE] * 2


def test_a_window_is_fixed_and_cuts() -> None:
    array = np.array([[[[-1000, -100, 100, 300, 3000]]]], np.int16)
    prep = Preprocessing((1, 5), "window", window=(-100.0, 300.0))
    np.testing.assert_allclose(prep.images(array)[0, 0, 0], [0, 0, 0.5, 1, 1])
