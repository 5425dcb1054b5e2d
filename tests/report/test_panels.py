"""Pictures of slices: painting, outlines, colour pictures."""

from __future__ import annotations

import numpy as np
import pytest

from pclmix.io.volume import Geometry, Volume
from pclmix.labels import IGNORE, Labels
from pclmix.report import figures

LABELS = Labels(("background", "RV", "LV"), 3)
ZOOM = 3


def test_paint_leaves_pixels_without_annotation() -> None:
    labels = np.array([[IGNORE, 0], [1, 2]])
    painted = figures.paint(np.zeros((2 * ZOOM, 2 * ZOOM, 3)), labels, LABELS, 1.0)
    centre = ZOOM // 2
    assert (painted[centre, centre] == 0).all()
    assert painted[centre, ZOOM + centre] == pytest.approx(figures.rgb(figures.BACKGROUND_STROKE))
    assert painted[ZOOM + centre, centre] == pytest.approx(figures.rgb(LABELS.colours()[1]))
    dense = figures.paint(np.zeros_like(painted), np.array([[0, 0], [1, 2]]), LABELS, 1.0)
    assert (dense[:2, :2] == 0).all()  # a dense mask's background is not painted


@pytest.mark.parametrize("first", [1, 0])
def test_outline_is_the_edge_of_the_region(first: int) -> None:
    """Also where the region lies at the border of the image."""
    truth = np.zeros((5, 5), dtype=int)
    truth[first : first + 3, first : first + 3] = 1
    drawn = figures.outline(np.zeros((5 * ZOOM, 5 * ZOOM, 3)), truth)[..., 0] > 0
    assert not drawn[figures.enlarge(truth) != 1].any()
    side = 3 * ZOOM
    assert drawn.sum() == side**2 - (side - 2) ** 2


def test_colour_pictures_are_shown_in_colour() -> None:
    array = np.zeros((3, 1, 4, 5), np.uint8)
    array[0], array[1] = 255, 128
    picture = figures.base(Volume(array, Geometry((1, 4, 5), (1.0, 1.0, 1.0))), 0)
    assert picture.shape == (4 * ZOOM, 5 * ZOOM, 3)
    assert picture[0, 0] == pytest.approx((1, 128 / 255, 0))


def test_channels_of_a_volume_are_not_colours() -> None:
    array = np.random.default_rng(0).integers(0, 900, (3, 2, 8, 9))
    volume = Volume(array, Geometry((2, 8, 9), (1.0, 1.0, 1.0), header="of a NIfTI file"))
    picture = figures.base(volume, 1)
    assert (picture == picture[..., :1]).all()


def test_large_pictures_are_not_enlarged() -> None:
    assert figures.zoom_of((256, 200)) == 3
    assert figures.zoom_of((3, 1000, 2000)) == 1
    assert figures.enlarge(np.zeros((1000, 2000))).shape == (1000, 2000)
