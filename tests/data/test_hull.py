"""The hull of a slice's strokes: pixels outside, and the share of them that becomes background."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import binary_dilation
from scipy.spatial import Delaunay
from torch import Generator

from pclmix.data.batch import draw_outside, mark_outside, outside_hull
from pclmix.labels import IGNORE

POINTS = st.lists(st.tuples(st.integers(0, 23), st.integers(0, 31)), min_size=4, max_size=12, unique=True)


def drawn_at(points: list[tuple[int, int]]) -> torch.Tensor:
    label = torch.full((1, 24, 32), IGNORE)
    for y, x in points:
        label[0, y, x] = 2
    return label


@given(POINTS)
@settings(max_examples=60, deadline=None)
def test_hull_agrees_with_qhull(points: list[tuple[int, int]]) -> None:
    array = np.array(points, float)
    if np.linalg.matrix_rank(array - array[0]) < 2:
        return  # on one line: Qhull has no hull
    y, x = np.mgrid[:24, :32]
    hull = (Delaunay(array).find_simplex(np.stack([y, x], -1).reshape(-1, 2)) >= 0).reshape(24, 32)
    outside = outside_hull(drawn_at(points))[0].numpy()
    assert not (outside & hull).any()
    assert outside[~binary_dilation(hull, np.ones((3, 3)), 4)].all()


def test_hull_by_hand() -> None:
    """A square given by four corners: its interior and pixels within one pixel of it are kept."""
    outside = outside_hull(drawn_at([(5, 10), (5, 20), (15, 10), (15, 20)]))[0]
    expected = torch.ones(24, 32, dtype=torch.bool)
    expected[5:16, 9:22] = False
    expected[4:17, 10:21] = False
    assert torch.equal(outside, expected)


@pytest.mark.parametrize(("down", "right"), [(1, 0), (0, 1), (1, 1), (1, -1)])
def test_hull_of_a_straight_stroke(down: int, right: int) -> None:
    label = torch.full((1, 256, 256), IGNORE)
    for n in range(200):
        label[0, 28 + down * n, (227 if right < 0 else 28) + right * n] = 2
    assert_close_around(label)


@given(st.integers(1, 199), st.booleans())
@settings(max_examples=20, deadline=None)
def test_hull_of_a_slanted_stroke_grows_less_than_a_pixel(rise: int, upright: bool) -> None:
    label = torch.full((1, 256, 256), IGNORE)
    for n in range(200):
        along, across = 28 + n, 28 + round(n * rise / 199)
        label[(0, along, across) if upright else (0, across, along)] = 2
    assert_close_around(label)


def assert_close_around(label: torch.Tensor) -> None:
    """Only the stroke and at most two pixels around it are not outside."""
    kept = ~outside_hull(label)[0].numpy()
    assert kept[(label[0] == 2).numpy()].all()
    assert not (kept & ~binary_dilation((label[0] == 2).numpy(), np.ones((3, 3)), 2)).any()


def test_hull_of_no_pixel_and_of_one_pixel() -> None:
    label = torch.cat([torch.full((1, 24, 32), IGNORE), drawn_at([(3, 4)])])
    outside = outside_hull(label)
    assert not outside[0].any()
    assert not outside[1, 3, 4]
    assert outside[1].sum() == 24 * 32 - 5


RING = [(5, 10), (5, 20), (15, 10), (15, 20)]


@pytest.mark.parametrize(
    ("ring", "inside", "holds"),
    [
        (RING, [(10, 15)], True),
        (RING, [(10, 15), (20, 15)], False),  # a structure outside: some short strokes, not a ring
        (RING, [], True),
        ([(5, 10), (5, 13), (6, 11)], [], False),  # a dab of background
        ([], [(10, 15), (5, 5), (20, 20)], False),
    ],
)
def test_the_outside_is_known_only_in_slices_with_a_ring(
    ring: list[tuple[int, int]], inside: list[tuple[int, int]], holds: bool
) -> None:
    label = drawn_at(inside)
    for y, x in ring:
        label[0, y, x] = 0
    marked = mark_outside(label[:, None], 0)[:, 1]
    assert torch.equal(marked == 0, outside_hull(label) & holds)


def test_a_share_of_the_marked_pixels_becomess_background_strokes() -> None:
    label = drawn_at([(10, 15)])
    label[0, *np.transpose(RING)] = 0
    both = mark_outside(label[:, None].to(torch.int16), 0)
    assert both.shape == (1, 2, 24, 32)
    assert both.dtype == torch.int16
    assert torch.equal(both[:, 0].long(), label)
    every = draw_outside(label, both[:, 1], 1.0, Generator().manual_seed(0))
    assert torch.equal(every == 0, outside_hull(label) | (label == 0))
    assert torch.equal(draw_outside(label, both[:, 1], 0.0, Generator().manual_seed(0)), label)
    drawn = [draw_outside(label, both[:, 1], 0.1, Generator().manual_seed(s)) for s in range(50)]
    outside = outside_hull(label)
    assert abs(float(torch.stack([(d == 0)[outside].float().mean() for d in drawn]).mean()) - 0.1) < 0.01
    assert all(torch.equal(d[label >= 0], label[label >= 0]) for d in drawn)
