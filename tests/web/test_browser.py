"""The page in a real browser: what is drawn on the screen is what labelsTr holds, on any orientation of the volume.

Skipped where Chromium or playwright is not installed.
"""

from __future__ import annotations

import io
import re
import time
import zipfile
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from pclmix.data.dataset import write_dataset_json
from pclmix.data.phantom import make_phantom
from pclmix.data.volume import read_image, write_labels
from pclmix.labels import Labels
from pclmix.web.workspace import make_dataset

pytestmark = pytest.mark.xdist_group("browser")


def labels_of(root: Path, case: str) -> np.ndarray:
    return np.asarray(nib.load(root / "labelsTr" / f"{case}.nii.gz").dataobj).transpose(2, 1, 0)


def wait_saved(page: Any) -> None:
    page.wait_for_timeout(350)  # saving begins a quarter of a second after the last change
    page.wait_for_selector("#saved:text-is('Saved')")


def picture(page: Any) -> tuple[np.ndarray, dict[str, float]]:
    """The canvas as grey values, and its place on the page."""
    box = page.locator("#canvas").bounding_box()
    shot = Image.open(io.BytesIO(page.locator("#canvas").screenshot())).convert("RGB")
    return np.asarray(shot).astype(int), box


def stroke(page: Any, points: list[tuple[float, float]]) -> None:
    page.mouse.move(*points[0])
    page.mouse.down()
    for x, y in points[1:]:
        page.mouse.move(x, y, steps=5)
    page.mouse.up()


@pytest.mark.parametrize("code", ["RAS", "LPS", "LAI", "PIR", "ASL", "SRP"])
def test_a_click_on_a_bright_voxel_labels_that_voxel(code, tmp_path, serve, open_page, affine_of):
    """The page is not asked where voxels are: a single bright one is found in the screenshot and clicked."""
    labels = Labels(("background", "one", "two"), 3)
    shape, bright = (5, 9, 12), (1, 2, 8)  # Z, H, W; nowhere near a symmetry
    image = np.zeros(shape)
    image[bright] = 1000
    root = tmp_path / "set"
    (root / "imagesTr").mkdir(parents=True)
    path = root / "imagesTr" / "case_0000.nii.gz"
    nib.save(nib.Nifti1Image(image.transpose(2, 1, 0).astype(np.int16), affine_of(code)), path)
    write_labels(root / "labelsTr" / "case.nii.gz", np.full(shape, 3), read_image(path).geometry)
    write_dataset_json(root, channels=["MRI"], labels=labels, ending=".nii.gz", cases=1)
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
        """Voxels that a click here changes, taken back again."""
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


def test_what_is_drawn_while_another_case_opens_goes_nowhere(dataset, serve, open_page):
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


def test_a_case_that_is_removed_can_be_left(dataset, serve, open_page):
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


@pytest.mark.slow
def test_draw_undo_save_reload_train_look_download(tmp_path, serve, open_page, monkeypatch):
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "cache"))
    root, case = tmp_path / "phantom", "phantom001_frame01"
    make_phantom(root, 1)
    server = serve(root)
    page = open_page(server.url)
    original = labels_of(root, case)
    box = page.locator("#canvas").bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    z = int(re.search(r"\d+", page.locator("#corner").inner_text())[0]) - 1

    # Draw: only this slice changes, to the class chosen, and one connected stroke of the pen's width.
    page.keyboard.press("1")
    page.locator("#pen").fill("3")
    stroke(
        page, [(middle[0] - 200, middle[1] + 180), (middle[0] - 60, middle[1] + 210), (middle[0] + 40, middle[1] + 150)]
    )
    wait_saved(page)
    first = labels_of(root, case)
    changed = first != original
    assert changed.any()
    assert not np.delete(changed, z, axis=0).any()
    assert (first[changed] == 1).all()
    # What the page holds is what the file holds, voxel by voxel.
    served = np.frombuffer(server.client.get(f"/api/cases/{case}/strokes").content, np.uint8).reshape(first.shape)
    assert np.array_equal(np.where(served == 0, 4, served.astype(int) - 1), first)

    # Undo, redo, eraser, clear.
    page.keyboard.press("Control+z")
    wait_saved(page)
    assert np.array_equal(labels_of(root, case), original)
    page.locator("#redo").click()
    wait_saved(page)
    assert np.array_equal(labels_of(root, case), first)
    page.keyboard.press("e")
    stroke(page, [(middle[0] - 200, middle[1] + 180), (middle[0] - 60, middle[1] + 210)])
    wait_saved(page)
    erased = labels_of(root, case)
    assert (erased[erased != first] == 4).all()
    assert (erased != first).any()
    page.keyboard.press("c")
    wait_saved(page)
    assert (labels_of(root, case)[z] == 4).all()
    assert np.array_equal(np.delete(labels_of(root, case), z, 0), np.delete(original, z, 0))
    page.keyboard.press("Control+z")
    wait_saved(page)
    assert np.array_equal(labels_of(root, case), erased)

    # A finger draws, too.
    page.keyboard.press("3")
    page.touchscreen.tap(middle[0] + 120, middle[1] + 220)
    wait_saved(page)
    tapped = labels_of(root, case)
    assert set(tapped[tapped != erased].tolist()) == {3}

    # Reload: the strokes are there, and the history leads back.
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert np.array_equal(labels_of(root, case), tapped)
    page.locator("#history").click()
    page.locator(".past button").last.click()
    page.wait_for_selector("#dialog:not([open])", state="attached")
    assert np.array_equal(labels_of(root, case), original)

    # Two windows: the second is told, and joins what both drew.
    other = open_page(f"{server.url}/?case={case}")
    page.route("**/api/events", lambda route: route.abort())
    page.reload()
    page.wait_for_selector("body[data-ready]")
    for window, key, dx in ((other, "1", 150), (page, "2", -150)):
        window.bring_to_front()
        window.keyboard.press(key)
        if window is page:
            break
        window.mouse.click(middle[0] + dx, middle[1] - 250)
        wait_saved(window)
    page.mouse.click(middle[0] - 150, middle[1] - 250)
    page.get_by_text("Keep both").click()
    wait_saved(page)
    joined = labels_of(root, case)
    assert set(joined[joined != original].tolist()) == {1, 2}
    page.unroute("**/api/events")
    other.close()

    # Train the smallest recipe, see the prediction, take over the slice, download.
    page.reload()
    page.wait_for_selector("body[data-ready]")
    page.get_by_text("Settings").click()
    page.locator("#recipe option[value=tiny]").wait_for(state="attached")
    page.locator("#recipe").select_option("tiny")
    page.locator("#method").select_option("pce")
    page.locator("#train").click()
    page.locator("#job-text").filter(has_text="Preparing").wait_for()
    page.reload()  # the job goes on without the page
    page.wait_for_selector("body[data-predicted]:not([data-predicted=''])", timeout=240_000)
    page.locator("#job-text").filter(has_text="finished").wait_for()
    assert page.locator(".curve").count() == 1
    page.mouse.move(5, 5)
    page.wait_for_timeout(500)
    shown, _ = picture(page)
    page.keyboard.press("o")
    page.wait_for_timeout(500)
    hidden, _ = picture(page)
    assert (np.abs(shown - hidden).max(axis=2) > 20).mean() > 0.001  # the overlay is seen
    page.keyboard.press("o")
    page.keyboard.press("u")
    page.wait_for_timeout(1000)
    assert np.abs(picture(page)[0] - shown).max() > 20  # so is the doubt
    page.keyboard.press("g")
    page.locator("#place").wait_for(state="visible")
    before = labels_of(root, case)
    z = int(re.search(r"\d+", page.locator("#corner").inner_text())[0]) - 1
    page.keyboard.press("a")
    wait_saved(page)
    after = labels_of(root, case)
    prediction = next((root / ".pclmix" / "predictions").glob(f"*/{case}.nii.gz"))
    predicted = np.asarray(nib.load(prediction).dataobj).transpose(2, 1, 0)
    assert np.array_equal(after[z], np.where(before[z] == 4, predicted[z], before[z]))
    assert np.array_equal(np.delete(after, z, 0), np.delete(before, z, 0))
    page.keyboard.press("Control+z")
    wait_saved(page)
    assert np.array_equal(labels_of(root, case), before)
    page.keyboard.down("Shift")
    page.mouse.click(*middle)
    page.keyboard.up("Shift")
    wait_saved(page)
    taken = labels_of(root, case)[z] != before[z]
    parts = {k: ndimage.label(predicted[z] == k)[0] for k in np.unique(predicted[z])}
    (label,) = np.unique(predicted[z][taken])
    (part,) = np.unique(parts[label][taken])
    assert np.array_equal(taken, (parts[label] == part) & (before[z] == 4))
    page.locator("#export").click()
    for name, entry in (("dataset", f"labelsTr/{case}.nii.gz"), ("predictions", f"predictions/{case}.nii.gz")):
        with page.expect_download() as download:
            page.locator(f"a[href$='{name}.zip']").click()
        with zipfile.ZipFile(download.value.path()) as archive:
            assert archive.testzip() is None
            assert entry in archive.namelist()


def test_help_and_dropped_image(dataset, serve, open_page, tmp_path):
    page = open_page(serve(dataset).url)
    page.keyboard.press("?")
    assert page.locator("#dialog kbd").count() > 10
    page.keyboard.press("Escape")
    image = tmp_path / "dropped.nii.gz"
    nib.save(nib.Nifti1Image(np.ones((8, 9, 3), np.int16), np.eye(4)), image)
    page.locator("#file").set_input_files(image)
    page.locator("#cases button", has_text="dropped").wait_for()
    page.locator("#cases button", has_text="dropped").click()
    page.wait_for_selector("body[data-ready=dropped]")
    page.locator("#filter").fill("case2")
    assert page.locator("#cases button").count() == 1
    deadline = time.monotonic() + 20
    while not (dataset / "labelsTr" / "dropped.nii.gz").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def drop(page: Any, *paths: Path) -> None:
    """Files or folders dragged from outside the browser and dropped on the image, as a file manager does."""
    session = page.context.new_cdp_session(page)
    box = page.locator("#view").bounding_box()
    data = {"items": [], "files": [str(p) for p in paths], "dragOperationsMask": 1}
    where = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    for kind in ("dragEnter", "dragOver", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "data": data, **where})
        page.wait_for_timeout(100)  # the page says between two moves whether it takes what is dropped


def test_a_dropped_dicom_folder_is_drawn_on(tmp_path, serve, open_page, slices):
    pytest.importorskip("pydicom", reason="pydicom is not installed: pip install 'pclmix[dicom]'")
    root, scan = tmp_path / "set", tmp_path / "Scan 7"
    make_dataset(root, ["RV", "LV"])
    (scan / "SE01").mkdir(parents=True)
    (scan / "notes.txt").write_text("not an image")
    for k, content in enumerate(slices("1.2.3", count=5)):
        (scan / "SE01" / f"IM{(3 * k) % 5}").write_bytes(content)
    page = open_page(serve(root).url, ready="#empty:not([hidden])")
    drop(page, scan)
    page.wait_for_selector("body[data-ready=SE01]")
    assert page.locator("#cases button").count() == 1
    assert page.locator("#corner").inner_text() == "Slice 3 of 5"
    page.keyboard.press("2")
    box = page.locator("#canvas").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    wait_saved(page)
    labels = labels_of(root, "SE01")
    assert labels.shape == (5, 20, 24)
    assert set(np.argwhere(labels == 2)[:, 0]) == {2}
    assert np.abs(np.argwhere(labels == 2).mean(axis=0) - (2, 9.5, 11.5)).max() <= 1
    for saved in ("labelsTr/SE01.nii.gz", "imagesTr/SE01_0000.nii.gz"):
        np.testing.assert_allclose(nib.load(root / saved).affine @ [5, 7, 2, 1], [*slices.place(5, 7, 2), 1], atol=1e-3)
    drop(page, scan)
    page.get_by_text("there already as SE01").wait_for()
