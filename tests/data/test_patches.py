"""Sliding windows cover a slice and are blended exactly; crops depend on the strokes and the seed only."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pclmix.data.preprocess import STEP, Crops, gaussian, slide, starts, windows
from pclmix.labels import IGNORE


@given(st.integers(1, 200), st.integers(1, 64))
@settings(max_examples=200, deadline=None)
def test_windows_cover_an_axis_and_overlap(length: int, patch: int) -> None:
    if patch > length:
        return
    found = starts(length, patch)
    assert found[0] == 0
    assert found[-1] == length - patch
    steps = np.diff(found)
    assert (steps <= max(1, int(STEP * patch)) + 1).all()  # rounding moves a window by one pixel at most
    assert (steps >= 0).all()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_windows_do_not_change_a_pixelwise_network(kind: str) -> None:
    image = np.random.default_rng(0).random((2, 3, 37, 50), np.float32)
    weight = gaussian((16, 24))
    if kind == "torch":
        given: Any = torch.tensor(image), (16, 24), torch.zeros, torch.tensor(weight)
        whole = slide(lambda x: torch.stack([x.sum(1), x[:, 0]], 1), *given).numpy()
    else:
        zeros = partial(np.zeros, dtype=np.float32)
        whole = slide(lambda x: np.stack([x.sum(1), x[:, 0]], 1), image, (16, 24), zeros, weight)
    np.testing.assert_allclose(whole, np.stack([image.sum(1), image[:, 0]], 1), rtol=1e-5, atol=1e-6)


def test_window_blending_equals_the_loop() -> None:
    """A network that returns the position of each pixel in its window: the result must be sum(w s) / sum(w)."""
    size, patch = (20, 9), (8, 8)
    inside = np.arange(64, dtype=np.float32).reshape(1, 1, 8, 8)
    zeros = partial(np.zeros, dtype=np.float32)
    found = slide(lambda _: inside, np.zeros((1, 1, *size), np.float32), patch, zeros, gaussian(patch))
    for y in range(size[0]):
        for x in range(size[1]):
            pairs = [
                (gaussian(patch)[y - top, x - left], inside[0, 0, y - top, x - left])
                for top, left in windows(size, patch)
                if 0 <= y - top < 8 and 0 <= x - left < 8
            ]
            expected = sum(w * s for w, s in pairs) / sum(w for w, _ in pairs)
            assert found[0, 0, y, x] == pytest.approx(expected, rel=1e-5)


@given(st.integers(0, 10), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_crops_contain_a_stroke_and_are_reproducible(seed: int, position: int) -> None:
    labels = np.full((2, 40, 30), IGNORE, np.int16)
    labels[0, 2, 3:20] = 0
    labels[0, 35, 28] = 2
    crops = Crops(labels, (16, 16), seed)
    for index in range(2):
        top, left = crops.corner(index, position)
        assert (top, left) == Crops(labels, (16, 16), seed).corner(index, position)
        assert 0 <= top <= 24
        assert 0 <= left <= 14
    top, left = crops.corner(0, position)
    assert (labels[0, top : top + 16, left : left + 16] != IGNORE).any()


def test_rare_classes_are_cropped_as_often() -> None:
    labels: Any = np.full((1, 64, 64), IGNORE, np.int16)
    labels[0, :40, :40] = 0
    labels[0, 60, 60] = 1
    crops = Crops(labels, (16, 16), 0)
    near = [min(crops.corner(0, position)) >= 40 for position in range(200)]
    assert 60 < sum(near) < 140
