"""Adding files in a real browser: chosen in the dialog, or dropped as a folder.

Skipped where Chromium or playwright is not installed.
"""

from __future__ import annotations

import time

import nibabel as nib
import numpy as np
import pytest
from browsing import drop, labels_of, wait_saved

from pclmix.web.workspace import make_dataset

pytestmark = pytest.mark.xdist_group("browser")


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


def test_dropped_dicom_folder_can_be_annotated(tmp_path, serve, open_page, slices):
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
    page.get_by_text("exists already as SE01").wait_for()
