"""The hull of a slice's strokes: what lies outside, and the share of it that counts as background."""

from __future__ import annotations

import numpy as np
import pytest
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


@pytest.mark.parametrize(("down", "right"), [(1, 0), (0, 1), (1, 1), (1, -1)])
def test_a_straight_stroke_across_a_large_image_leaves_only_its_neighbours(down: int, right: int) -> None:
    label = torch.full((1, 256, 256), IGNORE)
    for n in range(200):
        label[0, 28 + down * n, (227 if right < 0 else 28) + right * n] = 2
    assert_close_around(label)


@given(st.integers(1, 199), st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_slanted_stroke_is_widened_by_less_than_a_pixel(rise: int, upright: bool) -> None:
    label = torch.full((1, 256, 256), IGNORE)
    for n in range(200):
        along, across = 28 + n, 28 + round(n * rise / 199)
        label[(0, along, across) if upright else (0, across, along)] = 2
    assert_close_around(label)


def assert_close_around(label: torch.Tensor) -> None:
    """What is not outside is the stroke and at most two pixels around it."""
    kept = ~outside_hull(label)[0].numpy()
    assert kept[(label[0] == 2).numpy()].all()
    assert not (kept & ~binary_dilation((label[0] == 2).numpy(), np.ones((3, 3)), 2)).any()


def test_nothing_drawn_has_no_outside_and_one_pixel_has() -> None:
    label = torch.cat([torch.full((1, 24, 32), IGNORE), drawn_at([(3, 4)])])
    outside = outside_hull(label)
    assert not outside[0].any()
    assert not outside[1, 3, 4]
    assert outside[1].sum() == 24 * 32 - 5


def test_a_share_of_the_marked_pixels_become_background_strokes() -> None:
    label = drawn_at([(5, 10), (5, 20), (15, 10), (15, 20)])
    both = mark_outside(label[:, None].to(torch.int16), 0)
    assert both.shape == (1, 2, 24, 32)
    assert both.dtype == torch.int16
    assert torch.equal(both[:, 0].long(), label)
    every = draw_outside(label, both[:, 1], 1.0, Generator().manual_seed(0))
    assert torch.equal(every == 0, outside_hull(label))
    assert torch.equal(draw_outside(label, both[:, 1], 0.0, Generator().manual_seed(0)), label)
    drawn = [draw_outside(label, both[:, 1], 0.1, Generator().manual_seed(s)) for s in range(50)]
    outside = outside_hull(label)
    assert abs(float(torch.stack([(d == 0)[outside].float().mean() for d in drawn]).mean()) - 0.1) < 0.01
    assert all(torch.equal(d[label >= 0], label[label >= 0]) for d in drawn)
