"""A complete session in a real browser: draw, undo, reload, two windows, train, review, accept, download.

Skipped where Chromium or playwright is not installed.
"""

from __future__ import annotations

import re
import zipfile
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from browsing import labels_of, picture, stroke, wait_saved
from scipy import ndimage

from pclmix.synth.phantom import make_phantom

pytestmark = pytest.mark.xdist_group("browser")


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

    # Train the smallest recipe, review the prediction, accept the slice, download.
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


def test_starting_from_the_last_model_can_be_switched_off(dataset, serve, open_page):
    """The page asks for it unless the box is unticked, and keeps the choice."""
    page, asked = open_page(serve(dataset).url), []

    def note(route: Any) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(body='{"id": "20200101-000000"}', content_type="application/json")

    page.route("**/api/jobs/train", note)
    page.get_by_text("Settings").click()
    page.locator("#recipe option[value=tiny]").wait_for(state="attached")
    for choice in (True, False):
        page.get_by_label("Start from the last model").set_checked(choice)
        with page.expect_response("**/api/jobs/train"):
            page.locator("#train").click()
    assert [body["warm"] for body in asked] == [True, False]
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert not page.locator("#warm").is_checked()
