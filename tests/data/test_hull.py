"""Hulls of strokes: what lies outside all of them and inside one of them, and the share of it that counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import binary_dilation, binary_erosion
from scipy.spatial import Delaunay
from torch import Generator

from pclmix.config import Data
from pclmix.data.hull import draw, hull_shares, inside_hull, mark, outside_hull
from pclmix.errors import PclmixError
from pclmix.labels import IGNORE, Labels

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
    inside = inside_hull(drawn_at(points), 2)[0].numpy()
    assert inside[hull].all()
    assert hull[binary_erosion(inside, np.ones((3, 3)), border_value=1)].all()


def test_by_hand() -> None:
    """A square of four corners: its inside and what is within one pixel of it are kept."""
    outside = outside_hull(drawn_at([(5, 10), (5, 20), (15, 10), (15, 20)]))[0]
    expected = torch.ones(24, 32, dtype=torch.bool)
    expected[5:16, 9:22] = False
    expected[4:17, 10:21] = False
    assert torch.equal(outside, expected)
    expected[:] = False
    expected[5:16, 10:21] = True
    assert torch.equal(inside_hull(drawn_at([(5, 10), (5, 20), (15, 10), (15, 20)]), 2)[0], expected)


@pytest.mark.parametrize(("down", "right"), [(1, 0), (0, 1), (1, 1), (1, -1)])
def test_a_straight_stroke_across_a_large_image_is_its_own_hull(down: int, right: int) -> None:
    label = torch.full((1, 256, 256), IGNORE)
    for n in range(200):
        label[0, 28 + down * n, (227 if right < 0 else 28) + right * n] = 2
    assert torch.equal(inside_hull(label, 2), label == 2)


@given(st.integers(1, 199), st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_slanted_stroke_is_widened_by_less_than_a_pixel(rise: int, upright: bool) -> None:
    label = torch.full((1, 256, 256), IGNORE)
    for n in range(200):
        along, across = 28 + n, 28 + round(n * rise / 199)
        label[(0, along, across) if upright else (0, across, along)] = 2
    hull = inside_hull(label, 2)[0]
    assert hull.sum() < 3 * 200
    grown = torch.from_numpy(binary_dilation((label[0] == 2).numpy(), np.ones((3, 3))))
    assert not (hull & ~grown).any()


def test_nothing_drawn_has_no_outside_and_one_pixel_has() -> None:
    label = torch.cat([torch.full((1, 24, 32), IGNORE), drawn_at([(3, 4)])])
    outside = outside_hull(label)
    assert not outside[0].any()
    assert not outside[1, 3, 4]
    assert outside[1].sum() == 24 * 32 - 5
    assert not inside_hull(label, 1).any()
    assert not inside_hull(label, 2)[0].any()
    assert inside_hull(label, 2)[1].nonzero().tolist() == [[3, 4]]


def test_only_marked_pixels_without_a_stroke_become_strokes() -> None:
    label = drawn_at([(5, 10), (5, 20), (15, 10), (15, 20)])
    both = mark(label[:, None].to(torch.int16), {0: 1.0, 2: 1.0})
    assert both.shape == (1, 2, 24, 32)
    assert both.dtype == torch.int16
    assert torch.equal(both[:, 0].long(), label)
    every = draw(label, both[:, 1], {0: 1.0, 2: 1.0}, Generator().manual_seed(0))
    assert torch.equal(every == 0, outside_hull(label))
    assert torch.equal(every == 2, inside_hull(label, 2))
    assert torch.equal(draw(label, both[:, 1], {}, Generator().manual_seed(0)), label)
    drawn = [draw(label, both[:, 1], {0: 0.1, 2: 0.4}, Generator().manual_seed(s)) for s in range(50)]
    outside, free = outside_hull(label), inside_hull(label, 2) & (label < 0)
    assert abs(float(torch.stack([(d == 0)[outside].float().mean() for d in drawn]).mean()) - 0.1) < 0.01
    assert abs(float(torch.stack([(d == 2)[free].float().mean() for d in drawn]).mean()) - 0.4) < 0.02
    assert all(torch.equal(d[label >= 0], label[label >= 0]) for d in drawn)


def test_where_two_hulls_meet_neither_is_believed() -> None:
    label = drawn_at([(5, 10), (5, 20), (15, 10), (15, 20)])
    for y, x in ((5, 18), (5, 28), (15, 18), (15, 28)):
        label[0, y, x] = 1
    marked = mark(label[:, None], {1: 1.0, 2: 1.0})[0, 1]
    assert set(marked[6:15, 11:18].unique().tolist()) == {2}
    assert set(marked[6:15, 21:28].unique().tolist()) == {1}
    assert set(marked[6:15, 18:21].unique().tolist()) == {IGNORE}


def test_shares_are_given_by_the_names_of_structures() -> None:
    labels = Labels(("background", "RV", "Myo", "LV"), 4)
    assert hull_shares(Data(), labels) == {}
    assert hull_shares(Data(outside=0.1, inside={"LV": 0.2, "RV": 0}), labels) == {0: 0.1, 3: 0.2}
    with pytest.raises(
        PclmixError, match=r"data\.inside names LVV, this dataset has RV, Myo, LV; .* data\.inside=\{\}"
    ):
        hull_shares(Data(inside={"LVV": 0.2}), labels)
    assert hull_shares(Data(inside={"LVV": 0}), labels) == {}
    with pytest.raises(PclmixError, match=r"data\.inside\.background: .* has data\.outside"):
        hull_shares(Data(inside={"background": 0.2}), labels)
