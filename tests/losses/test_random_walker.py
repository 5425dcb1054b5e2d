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


def test_the_walk_equals_the_linear_system() -> None:
    """On a chain of three pixels the middle one reaches the more similar end first."""
    image = np.array([[[0.0, 0.2, 1.0]]], dtype=np.float32)
    scribble = np.array([[1, IGNORE, 2]], dtype=np.int16)
    assert random_walker_labels(image, scribble).tolist() == [[1, 1, 2]]
    assert random_walker_labels(image[..., ::-1].copy(), scribble).tolist() == [[1, 2, 2]]
