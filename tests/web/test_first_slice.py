"""The slice painted before the viewer has started equals that of the viewer: place, orientation, window."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from pclmix.data.dataset import write_dataset_json
from pclmix.labels import Labels

pytestmark = pytest.mark.xdist_group("browser")


def scan(shape: tuple[int, int, int] = (56, 40, 5), kind: Any = np.int16) -> np.ndarray:
    """Smooth noise with one bright corner, so that every rotation and reflection differs; (X, Y, Z)."""
    clouds = ndimage.gaussian_filter(np.random.default_rng(0).normal(size=shape), (3, 3, 0))
    clouds = (clouds - clouds.min()) / np.ptp(clouds) * 800
    clouds[:20, :15] += 400
    return clouds.astype(kind)


def kinds(affine_of: Any) -> dict[str, nib.Nifti1Image]:
    images = {code: nib.Nifti1Image(scan(), affine_of(code)) for code in ("RAS", "LPS", "PIR", "SRP")}
    turned = nib.Nifti1Image(scan((30, 70, 3)), None)
    turned.set_sform(None, 0)
    turned.set_qform(affine_of("LAI"), 1)
    scaled = nib.Nifti1Image(scan(kind=np.int16), affine_of("LPS"))
    scaled.header.set_slope_inter(2.5, -100)
    empty = scan()
    empty[16:] = 0  # most of it
    alike = np.full((56, 40, 5), 50, np.int16)
    alike[20:24, 18:22] = 80
    single = nib.Nifti1Image(scan((40, 56, 1), np.float32), affine_of("ASL"))
    return {
        **images,
        "quaternion": turned,
        "scaled": scaled,
        "empty": nib.Nifti1Image(empty, affine_of("RAS")),
        "alike": nib.Nifti1Image(alike, affine_of("RAS")),
        "single": single,
    }


def shown(page: Any) -> np.ndarray:
    page.wait_for_timeout(400)
    page.evaluate("for (const id of ['hud', 'readout', 'corner']) document.getElementById(id).style.opacity = 0")
    return np.asarray(Image.open(io.BytesIO(page.locator("#canvas-box").screenshot())).convert("L")).astype(int)


def test_first_slice_equals_the_viewer(tmp_path: Path, serve, open_page, affine_of):
    (tmp_path / "imagesTr").mkdir()
    for name, image in kinds(affine_of).items():
        nib.save(image, tmp_path / "imagesTr" / f"{name}_0000.nii.gz")
    labels = Labels(("background", "one"), 2)
    write_dataset_json(tmp_path, channels=["MRI"], labels=labels, ending=".nii.gz", cases=9)
    url = serve(tmp_path).url
    for name in kinds(affine_of):
        page = open_page(f"{url}/?case={name}", ready="#first", hold="**/app.js")
        before = shown(page)
        page.release()
        page.wait_for_selector("body[data-ready]")
        assert page.locator("#first").count() == 0
        after = shown(page)
        assert (after > 10).mean() > 0.002, name
        difference = np.abs(before - after)
        assert (difference > 16).mean() < 0.003, name
        assert difference.mean() < 1.5, name
        page.close()


def test_first_case(page):
    """The requested case, or the first one; the bytes of its file."""
    for asked, name in (("case2", "case2"), ("", "case1"), ("../../etc/passwd", "case1")):
        answer = page.client.get("/api/first", params={"case": asked})
        assert (answer.status_code, answer.headers["x-case"]) == (200, name)
        assert answer.content == (page.root / "imagesTr" / f"{name}_0000.nii.gz").read_bytes()


def test_static_files(page):
    """Unchanged files give 304, and modules are served as JavaScript on any system."""
    answer = page.client.get("/first.js")
    assert answer.headers["content-type"].startswith("text/javascript")
    again = page.client.get("/first.js", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert page.client.head("/vendor/niivue.js").headers["content-length"] > "3"
    assert page.client.get("/nothing.js").status_code == 404
    assert page.client.get("/../app.py").status_code == 404
    assert page.client.post("/first.js").status_code in (405, 413)
