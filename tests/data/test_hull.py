"""Outside the hull of strokes: never a pixel of the hull, almost all of the rest; a drawn share becomes background."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import binary_dilation
from scipy.spatial import Delaunay
from torch import Generator

from pclmix.data.hull import draw_outside, mark_outside, outside_hull
from pclmix.labels import IGNORE

POINTS = st.lists(st.tuples(st.integers(0, 23), st.integers(0, 31)), min_size=4, max_size=12, unique=True)


def drawn_at(points: list[tuple[int, int]]) -> torch.Tensor:
    label = torch.full((1, 24, 32), IGNORE)
    for y, x in points:
        label[0, y, x] = 2
    return label


@given(POINTS)
@settings(max_examples=60, deadline=None)
def test_agrees_with_the_hull_of_qhull(points: list[tuple[int, int]]) -> None:
    array = np.array(points, float)
    if np.linalg.matrix_rank(array - array[0]) < 2:
        return  # on one line: Qhull has no hull
    y, x = np.mgrid[:24, :32]
    hull = (Delaunay(array).find_simplex(np.stack([y, x], -1).reshape(-1, 2)) >= 0).reshape(24, 32)
    outside = outside_hull(drawn_at(points))[0].numpy()
    assert not (outside & hull).any()
    assert outside[~binary_dilation(hull, np.ones((3, 3)), 4)].all()


def test_by_hand() -> None:
    """A square of four corners: its inside and what is within one pixel of it are kept."""
    outside = outside_hull(drawn_at([(5, 10), (5, 20), (15, 10), (15, 20)]))[0]
    expected = torch.ones(24, 32, dtype=torch.bool)
    expected[5:16, 9:22] = False
    expected[4:17, 10:21] = False
    assert torch.equal(outside, expected)


def test_nothing_drawn_has_no_outside_and_one_pixel_has() -> None:
    label = torch.cat([torch.full((1, 24, 32), IGNORE), drawn_at([(3, 4)])])
    outside = outside_hull(label)
    assert not outside[0].any()
    assert not outside[1, 3, 4]
    assert outside[1].sum() == 24 * 32 - 5


def test_only_marked_pixels_without_a_stroke_become_background() -> None:
    label = drawn_at([(5, 10), (5, 20), (15, 10), (15, 20)])
    both = mark_outside(label[:, None].to(torch.int16))
    assert both.shape == (1, 2, 24, 32)
    assert torch.equal(both[:, 0].long(), label)
    every = draw_outside(label, both[:, 1], 1.0, Generator().manual_seed(0))
    assert torch.equal(every == 0, outside_hull(label))
    assert torch.equal(every[label >= 0], label[label >= 0])
    assert torch.equal(draw_outside(label, both[:, 1], 0.0, Generator().manual_seed(0)), label)
    count = sum(int((draw_outside(label, both[:, 1], 0.1, Generator().manual_seed(s)) == 0).sum()) for s in range(50))
    assert abs(count / 50 / int(outside_hull(label).sum()) - 0.1) < 0.01
