from __future__ import annotations

import numpy as np

from pclmix.labels import IGNORE
from pclmix.losses.superpixel import superpixels, walk_scribbles


def test_walk_by_hand() -> None:
    numbers = np.array([[0, 0, 1, 1], [2, 2, 3, 3]])
    scribble = np.array([[1, IGNORE, 0, 2], [IGNORE, IGNORE, IGNORE, 0]], dtype=np.int16)
    # 0 touches class 1; 1 touches two classes and keeps what was drawn; 2 touches none; 3 touches background.
    assert walk_scribbles(numbers, scribble).tolist() == [[1, 1, 0, 2], [IGNORE, IGNORE, 0, 0]]


def test_nothing_drawn_walks_nowhere() -> None:
    scribble = np.full((4, 4), IGNORE, dtype=np.int16)
    assert (walk_scribbles(np.arange(16).reshape(4, 4), scribble) == IGNORE).all()


def test_superpixels_follow_the_image() -> None:
    image = np.zeros((1, 64, 64), dtype=np.float32)
    image[:, :, 23:41] = 1
    numbers = superpixels(image)
    assert numbers.shape == (64, 64)
    assert np.array_equal(np.unique(numbers), np.arange(numbers.max() + 1))
    assert 100 < numbers.max() < 300
    values = [np.unique(image[0][numbers == n]) for n in range(numbers.max() + 1)]
    assert np.mean([len(v) == 1 for v in values]) > 0.95


def test_a_flat_image_is_cut_evenly() -> None:
    assert superpixels(np.zeros((1, 64, 64), np.float32)).max() > 50
