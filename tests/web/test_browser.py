"""The page in a real browser: drawing on the screen labels the right voxels for any orientation.

Skipped where Chromium or playwright is not installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from browsing import labels_of, one_voxel, picture, stroke, wait_saved

pytestmark = pytest.mark.xdist_group("browser")


@pytest.mark.parametrize("code", ["RAS", "LPS", "LAI", "PIR", "ASL", "SRP"])
def test_a_click_on_a_bright_voxel_labels_that_voxel(code, tmp_path, serve, open_page, affine_of):
    """Independent of the page's own geometry: the bright voxel is located in the screenshot and clicked."""
    bright, root = (1, 2, 8), tmp_path / "set"  # Z, H, W; nowhere near a symmetry
    one_voxel(root, affine_of(code), (5, 9, 12), bright)
    page = open_page(serve(root).url)
    page.keyboard.press("ArrowUp")  # from the middle slice, 3, to 2
    assert page.locator("#corner").inner_text() == "Slice 2 of 5"
    page.locator("#pen").fill("1")
    page.keyboard.press("2")
    page.mouse.move(5, 5)
    page.wait_for_timeout(300)
    grey, box = picture(page)
    rows, columns = np.nonzero(grey.min(axis=2) > 200)
    assert len(rows), "the bright voxel is not on the screen"
    page.mouse.click(box["x"] + np.median(columns), box["y"] + np.median(rows))
    wait_saved(page)
    assert np.argwhere(labels_of(root, "case") != 3).tolist() == [list(bright)]
    assert labels_of(root, "case")[bright] == 2
    page.mouse.move(5, 5)
    page.wait_for_timeout(300)
    colour = picture(page)[0][int(np.median(rows)), int(np.median(columns))]
    assert colour.max() - colour.min() > 60  # and the stroke is shown where the voxel is


def test_zoom_keeps_the_voxel_under_the_pointer_and_space_moves_the_image(dataset, serve, open_page):
    page = open_page(f"{serve(dataset).url}/?case=case1")
    before = labels_of(dataset, "case1")
    box = page.locator("#canvas").bounding_box()
    x, y = box["x"] + 0.65 * box["width"], box["y"] + 0.6 * box["height"]
    page.locator("#pen").fill("1")

    def click() -> list[list[int]]:
        """Voxels changed by a click here; the click is undone."""
        page.mouse.click(x, y)
        wait_saved(page)
        changed = np.argwhere(labels_of(dataset, "case1") != before).tolist()
        page.keyboard.press("Control+z")
        wait_saved(page)
        return changed

    here = click()
    assert len(here) == 1
    page.keyboard.down("Control")
    for _ in range(3):
        page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    assert click() == here
    page.mouse.move(x - 40, y - 30)
    page.keyboard.down("Space")
    page.mouse.down()
    page.mouse.move(x + 60, y + 70, steps=4)
    page.mouse.up()
    page.keyboard.up("Space")
    x, y = x + 100, y + 100  # where that voxel now is
    assert click() == here


def test_drawing_while_another_case_loads_is_ignored(dataset, serve, open_page):
    page = open_page(f"{serve(dataset).url}/?case=case1")
    before = [labels_of(dataset, case) for case in ("case1", "case2")]
    box = page.locator("#canvas").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    held: list[Any] = []
    page.route("**/case2/image/0", lambda route: held.append(route))
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(500)  # its strokes are there, its image is not
    stroke(page, [(x - 50, y), (x + 50, y)])
    for key in ("a", "c", "Control+z"):
        page.keyboard.press(key)
    page.wait_for_timeout(500)
    for route in held:
        route.continue_()
    page.wait_for_selector("body[data-ready=case2]")
    page.wait_for_timeout(500)
    assert all(np.array_equal(labels_of(dataset, f"case{k}"), labels) for k, labels in enumerate(before, start=1))
    page.mouse.click(x, y)
    wait_saved(page)
    assert not np.array_equal(labels_of(dataset, "case2"), before[1])


def test_removed_case_can_be_left(dataset, serve, open_page):
    page = open_page(f"{serve(dataset).url}/?case=case1")
    page.wait_for_selector("#cases button >> nth=1")
    for path in (dataset / "imagesTr" / "case1_0000.nii.gz", dataset / "labelsTr" / "case1.nii.gz"):
        path.unlink()
    box = page.locator("#canvas").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator("#saved", has_text="Not saved").wait_for()
    page.locator("#cases button", has_text="case2").click()
    page.wait_for_selector("body[data-ready=case2]")
    assert not (dataset / "labelsTr" / "case1.nii.gz").exists()
