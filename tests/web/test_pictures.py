"""Colour images, thumbnails, the type of an empty dataset, phases of a run."""

from __future__ import annotations

import gzip
import io
import json
import os
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import yaml
from browsing import one_voxel, pictures
from PIL import Image
from uploading import listing, send, zipped

from pclmix.data.dataset import Dataset
from pclmix.web.workspace import make_dataset, training


def png(shape: tuple[int, ...], dtype: type = np.uint8, palette: bool = False) -> bytes:
    buffer = io.BytesIO()
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 200, shape).astype(dtype))
    (picture.quantize(16) if palette else picture).save(buffer, "PNG")
    return buffer.getvalue()


def test_colour_images_and_channels(serve, tmp_path):
    page = serve(pictures(tmp_path / "set", (7, 9), 1))
    about = page.client.get("/api/dataset").json()
    assert (about["picture"], about["coloured"]) == (True, True)
    stored = np.asarray(Image.open(tmp_path / "set" / "imagesTr" / "photo1_0000.png"))
    content = gzip.decompress(page.client.get("/api/cases/photo1/image/colour").content)
    rgb = np.asarray(nib.Nifti1Image.from_bytes(content).dataobj)
    assert np.array_equal(np.stack([rgb[k][:, :, 0].T for k in "RGB"], -1), stored)
    assert page.client.get("/api/first").content == page.client.get("/api/cases/photo1/image/colour").content
    for channel in range(3):
        content = gzip.decompress(page.client.get(f"/api/cases/photo1/image/{channel}").content)
        one = np.asarray(nib.Nifti1Image.from_bytes(content).dataobj)
        assert np.array_equal(one[:, :, 0].T, stored[:, :, channel])


@pytest.mark.parametrize("code", ["RAS", "LPS", "PIR", "ASL", "SRP"])
def test_thumbnail_orientation(code, serve, tmp_path, affine_of):
    """The corner towards the right and anterior (or superior) is at the top left, as on the page."""
    affine, shape = affine_of(code), (3, 40, 40)
    one_voxel(tmp_path / "set", affine, shape, (1, 0, 0))
    image = np.zeros(shape[::-1], np.int16)
    brightness = {(-1, 1): 100, (1, 1): 200, (-1, -1): 300, (1, -1): 400}  # by columns to the right, rows up
    for i in (0, 32):
        for j in (0, 32):
            towards = (affine @ [i + 4, j + 4, 1, 1] - affine @ [20, 20, 1, 1])[:3]
            across, up = (axis for axis in range(3) if abs(towards[axis]) > 1)
            mirrored = -1 if across == 0 else 1  # the patient's left is on the right; anterior is on the right
            place = int(mirrored * np.sign(towards[across])), int(np.sign(towards[up]))
            image[i : i + 8, j : j + 8] = brightness[place]
    nib.save(nib.Nifti1Image(image, affine), tmp_path / "set" / "imagesTr" / "case_0000.nii.gz")
    page = serve(tmp_path / "set")
    answer = page.client.get("/api/cases/case/thumbnail")
    assert answer.headers["content-type"] == "image/png"
    shown = np.asarray(Image.open(io.BytesIO(answer.content))).astype(int)
    height, width = shown.shape
    corners = [shown[y, x] for y in (height // 12, -height // 12) for x in (width // 12, -width // 12)]
    assert corners == sorted(corners)
    assert corners[3] - corners[0] > 100
    before = listing(tmp_path / "set")
    assert page.client.get("/api/cases/case/thumbnail").content == answer.content
    nib.save(nib.Nifti1Image(400 - image, affine), tmp_path / "set" / "imagesTr" / "case_0000.nii.gz")
    assert page.client.get("/api/cases/case/thumbnail").content != answer.content
    assert len(listing(tmp_path / "set")) == len(before)


@pytest.mark.parametrize(
    ("name", "content", "ending", "channels"),
    [
        ("a.png", png((20, 30)), ".png", ("image",)),
        ("a.png", png((20, 30, 3)), ".png", ("red", "green", "blue")),
        ("a.png", png((20, 30, 3), palette=True), ".png", ("red", "green", "blue")),
        ("a.nii", nib.Nifti1Image(np.zeros((4, 5, 6), np.int16), np.eye(4)).to_bytes(), ".nii.gz", ("image",)),
        ("a.zip", zipped({f"a_000{c}.png": png((20, 30)) for c in range(2)}), ".png", ("image 0", "image 1")),
    ],
    ids=["grey", "colour", "palette", "volume", "two channels"],
)
def test_first_image_sets_ending_and_channels(serve, tmp_path, name, content, ending, channels):
    make_dataset(tmp_path / "set", ["one"])
    page = serve(tmp_path / "set")
    assert send(page, "b.png", b"not a picture").status_code == 400
    assert send(page, name, content).json()["cases"] == ["a"]
    dataset = Dataset.open(tmp_path / "set")
    assert (dataset.ending, dataset.channels, dataset.cases) == (ending, channels, ("a",))
    assert dataset.read_scribble("a")[0].shape == dataset.read_image("a").array.shape[1:]
    other = "c.png" if ending == ".nii.gz" else "c.nii.gz"
    wrong = png((9, 9)) if ending == ".nii.gz" else gzip.compress(nib.Nifti1Image(np.zeros((4, 5, 6)), None).to_bytes())
    assert send(page, other, wrong).status_code == 400
    assert Dataset.open(tmp_path / "set").cases == ("a",)


def run_folder(run: Path, engine: dict, about: dict | None, steps: list[int]) -> None:
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump({"engine": engine}))
    if about is not None:
        (run / "run.json").write_text(json.dumps(about))
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "loss": 1.0}) + "\n" for s in steps))


@pytest.mark.parametrize(
    ("engine", "about", "steps", "phase"),
    [
        ({"iterations": 100, "log_every": 10}, None, [], "preparing"),
        ({"iterations": 100, "log_every": 10}, {"step": 0}, [], "training"),
        ({"iterations": 100, "log_every": 10}, {"step": 0}, [1, 50], "training"),
        ({"iterations": 100, "log_every": 10}, {"step": 0}, [1, 100], "finishing"),
        ({"iterations": 95, "log_every": 10}, {"step": 0}, [1, 90], "finishing"),
        ({"seconds": 60.0, "iterations": 9}, {"step": 0}, [1, 1000], "training"),
        ({"seconds": 60.0, "iterations": 9}, {"step": 0, "seconds": 60.0}, [1], "finishing"),
    ],
)
def test_phases_of_a_training(tmp_path, engine, about, steps, phase):
    begun = time.time() - 0.1
    run_folder(tmp_path / "run", engine, about, steps)
    state = training(tmp_path / "run", begun)
    assert state["phase"] == phase
    assert 0 <= state["share"] <= 1
    assert training(tmp_path / "run", None)["phase"] == ""
    if about is not None:  # the run of an earlier job that this one goes on with
        os.utime(tmp_path / "run" / "run.json", (begun - 100, begun - 100))
        assert training(tmp_path / "run", begun)["phase"] == "preparing"
