"""Interpolation of strokes between drawn slices."""

from __future__ import annotations

import numpy as np
import pytest
from browsing import labels_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from pclmix.data.dataset import Dataset
from pclmix.labels import IGNORE
from pclmix.synth.phantom import make_phantom
from pclmix.web.assist import fill_between
from pclmix.web.strokes import paint, runs_of

PLAIN = np.zeros((1, 5, 40, 40), np.float32)


def test_strokes_are_interpolated_linearly():
    """From row 10 to row 14 over four slices: one row each."""
    labels = np.full((5, 120, 120), IGNORE, np.int16)
    labels[0, 10, 5:30] = labels[4, 14, 5:30] = 1
    filled, slices = fill_between(labels, np.zeros((1, *labels.shape), np.float32), 3.0)
    assert slices == 3
    for z in (1, 2, 3):
        assert (filled[z, 10 + z, 5:30] == 1).all()
        assert (filled[z] >= 0).sum() == 25
    assert (filled[[0, 4]] == IGNORE).all()


def test_ambiguous_pixels_are_left_open():
    labels = np.full((5, 40, 40), IGNORE, np.int16)
    labels[0, 10, 5:30] = labels[4, 10, 5:30] = 1
    assert fill_between(labels, PLAIN, 9.0)[1] == 0, "36 mm apart"
    image = PLAIN.copy()
    image[:, 1:4, :, 20:] = 100
    filled, _ = fill_between(labels, image, 3.0)
    assert (filled[2, 10, 5:15] == 1).all()
    assert (filled[2, :, 22:] == IGNORE).all(), "looks like something else"
    labels[2, 10, 12] = 2
    filled, _ = fill_between(labels, PLAIN, 3.0)
    assert (filled[2, 10, 11:14] == IGNORE).all(), "beside a stroke of another class"
    assert filled[2, 10, 20] == 1
    labels[4] = IGNORE
    labels[4, 30, 5:30] = 1
    assert fill_between(labels, PLAIN, 3.0)[1] == 0, "too far to be the same part"


def test_interpolated_strokes_agree_with_the_mask(tmp_path):
    """On the phantom with every second slice drawn, nearly all interpolated pixels have the class of the mask."""
    make_phantom(tmp_path / "phantom", 3)
    dataset, right, total = Dataset.open(tmp_path / "phantom"), 0, 0
    for case in dataset.cases:
        strokes, geometry = dataset.read_scribble(case)
        strokes[1::2] = IGNORE
        filled, _ = fill_between(strokes, dataset.read_image(case).array, geometry.spacing[0])
        assert not (filled[strokes >= 0] >= 0).any()
        drawn = filled >= 0
        right += int((filled[drawn] == dataset.read_reference(case)[0][drawn]).sum())
        total += int(drawn.sum())
    assert total > 500
    assert right / total > 0.97


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-1, 3), min_size=60, max_size=60))
def test_runs_reproduce_the_map(values):
    array = np.array(values, np.int16).reshape(3, 4, 5)
    again = np.full_like(array, IGNORE)
    paint(again, runs_of(array), 4)
    assert np.array_equal(again, array)


def test_between_returns_runs_and_changes_nothing(page):
    """The route only computes runs; the page draws them, so that they can be undone."""
    root = page.root
    version = page.client.get("/api/cases/case1/strokes").headers["x-version"]
    runs = [[0, 480, -1], [2 * 10, 6, 2], [240 + 2 * 10, 6, 2]]
    page.client.post("/api/cases/case1/strokes", json={"version": version, "runs": runs})
    before = labels_of(root, "case1")
    answer = page.client.post("/api/cases/case1/between").json()
    assert answer["version"] == page.client.get("/api/cases/case1/strokes").headers["x-version"]
    assert all(120 <= start < 240 and label == 2 for start, _, label in answer["runs"])
    assert np.array_equal(labels_of(root, "case1"), before)


@pytest.mark.xdist_group("browser")
def test_interpolation_can_be_undone(tmp_path, serve, open_page):
    make_phantom(tmp_path / "phantom", 1)
    case = "phantom001_frame01"
    dataset = Dataset.open(tmp_path / "phantom")
    strokes, geometry = dataset.read_scribble(case)
    strokes[1::2] = IGNORE
    from pclmix.io.volume import write_labels

    write_labels(dataset.scribble_path(case), dataset.labels.encode(strokes), geometry)
    expected, _ = fill_between(strokes, dataset.read_image(case).array, geometry.spacing[0])
    page = open_page(f"{serve(tmp_path / 'phantom').url}/?case={case}")
    page.locator("#between").click()
    page.get_by_text("Interpolated").wait_for()
    page.wait_for_timeout(800)
    after = dataset.read_scribble(case)[0]
    assert np.array_equal(after, np.where(strokes >= 0, strokes, expected))
    page.keyboard.press("Control+z")
    page.wait_for_timeout(800)
    assert np.array_equal(dataset.read_scribble(case)[0], strokes)
    assert ndimage.label(expected >= 0)[1] > 0
