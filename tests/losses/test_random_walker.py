from __future__ import annotations

import numpy as np
import pytest

from pclmix.labels import IGNORE
from pclmix.losses.random_walker import random_walker_labels


def blocks(*values: float) -> np.ndarray:
    """Vertical bands of 8 columns, 16 rows."""
    return np.repeat(np.array(values, dtype=np.float32), 8)[None, None].repeat(16, axis=1)


def test_bands_take_the_class_drawn_in_them() -> None:
    scribble = np.full((16, 24), IGNORE, dtype=np.int16)
    scribble[8, 2], scribble[8, 12], scribble[8, 20] = 0, 1, 2
    found = random_walker_labels(blocks(0.1, 0.5, 0.9), scribble)
    assert found.dtype == np.int16
    assert (found == np.repeat([0, 1, 2], 8)[None]).mean() > 0.97
    assert (found[scribble >= 0] == scribble[scribble >= 0]).all()


def test_a_class_that_is_missing_does_not_shift_the_others() -> None:
    scribble = np.full((16, 24), IGNORE, dtype=np.int16)
    scribble[8, 2], scribble[8, 20] = 0, 3
    found = random_walker_labels(blocks(0.1, 0.1, 0.9), scribble)
    assert set(np.unique(found)) == {0, 3}
    assert (found[:, 17:] == 3).all()


@pytest.mark.parametrize(("drawn", "elsewhere"), [([], IGNORE), ([0], 0), ([2], IGNORE)])
def test_fewer_than_two_classes(drawn: list[int], elsewhere: int) -> None:
    scribble = np.full((8, 16), IGNORE, dtype=np.int16)
    for k in drawn:
        scribble[4, 3] = k
    found = random_walker_labels(blocks(0.2, 0.7)[:, :8], scribble)
    assert found[0, 0] == elsewhere
    assert (found[scribble >= 0] == scribble[scribble >= 0]).all()


def test_a_slice_of_one_grey_value_goes_by_distance() -> None:
    scribble = np.full((16, 16), IGNORE, dtype=np.int16)
    scribble[8, 0], scribble[8, 15] = 1, 2
    found = random_walker_labels(np.full((1, 16, 16), 0.5, np.float32), scribble)
    assert (found[:, :7] == 1).all()
    assert (found[:, 9:] == 2).all()


def slow_walk(image: np.ndarray, scribble: np.ndarray) -> np.ndarray:
    """Grady's linear system, written out: how likely a walker from each pixel reaches each class first."""
    grey = (image[0].astype(float) + 0.35) / 1.7 * 2 - 1
    h, w = grey.shape
    laplacian = np.zeros((h * w, h * w))
    for y, x in np.ndindex(h, w):
        for v, u in ((y + 1, x), (y, x + 1)):
            if v < h and u < w:
                weight = np.exp(-100 * (grey[y, x] - grey[v, u]) ** 2 / (10 * grey.std())) + 1e-10
                i, j = y * w + x, v * w + u
                laplacian[[i, j], [i, j]] += weight
                laplacian[[i, j], [j, i]] -= weight
    flat = scribble.ravel()
    free, classes = flat == IGNORE, np.unique(flat[flat != IGNORE])
    drawn = (flat[~free, None] == classes[None]).astype(float)
    reached = np.linalg.solve(laplacian[np.ix_(free, free)], -laplacian[np.ix_(free, ~free)] @ drawn)
    found = flat.copy()
    found[free] = classes[reached.argmax(1)]
    return found.reshape(h, w)


@pytest.mark.parametrize("seed", range(4))
def test_the_walk_equals_the_linear_system(seed: int) -> None:
    rng = np.random.default_rng(seed)
    image = rng.random((1, 12, 10)).astype(np.float32)
    scribble = np.full((12, 10), IGNORE, dtype=np.int16)
    scribble[rng.integers(0, 12, 9), rng.integers(0, 10, 9)] = np.repeat([0, 1, 3], 3)
    found = random_walker_labels(image, scribble)
    assert (found == slow_walk(image, scribble)).all()
    assert not np.array_equal(found, random_walker_labels(image, scribble, beta=1.0))


def test_the_middle_of_a_chain_goes_to_the_end_that_is_more_like_it() -> None:
    image = np.array([[[0.0, 0.2, 1.0]]], dtype=np.float32)
    scribble = np.array([[1, IGNORE, 2]], dtype=np.int16)
    assert random_walker_labels(image, scribble).tolist() == [[1, 1, 2]]
    assert random_walker_labels(image[..., ::-1].copy(), scribble).tolist() == [[1, 2, 2]]
