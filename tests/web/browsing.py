"""Helpers of the browser tests: labels on disk, strokes with the mouse, screenshots of the canvas."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from PIL import Image

from pclmix.data.dataset import write_dataset_json
from pclmix.inference.uncertainty import Examined, Quality
from pclmix.io.volume import read_image, write_labels
from pclmix.labels import Labels
from pclmix.web.strokes import StrokeStore
from pclmix.web.workspace import PredictionStore, Workspace


def labels_of(root: Path, case: str) -> np.ndarray:
    return np.asarray(nib.load(root / "labelsTr" / f"{case}.nii.gz").dataobj).transpose(2, 1, 0)


def wait_saved(page: Any) -> None:
    page.wait_for_timeout(350)  # saving begins a quarter of a second after the last change
    page.wait_for_selector("#saved:text-is('Saved')")


def picture(page: Any) -> tuple[np.ndarray, dict[str, float]]:
    """Screenshot of the canvas without annotations, and its bounding box."""
    page.evaluate("for (const id of ['hud', 'readout', 'corner']) document.getElementById(id).style.opacity = 0")
    box = page.locator("#canvas").bounding_box()
    shot = Image.open(io.BytesIO(page.locator("#canvas").screenshot())).convert("RGB")
    return np.asarray(shot).astype(int), box


def stroke(page: Any, points: list[tuple[float, float]]) -> None:
    page.mouse.move(*points[0])
    page.mouse.down()
    for x, y in points[1:]:
        page.mouse.move(x, y, steps=5)
    page.mouse.up()


def drop(page: Any, *paths: Path) -> None:
    """Files or folders dragged from outside the browser and dropped on the image, as a file manager does."""
    session = page.context.new_cdp_session(page)
    box = page.locator("#view").bounding_box()
    data = {"items": [], "files": [str(p) for p in paths], "dragOperationsMask": 1}
    where = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    for kind in ("dragEnter", "dragOver", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "data": data, **where})
        page.wait_for_timeout(100)  # the page says between two moves whether it takes what is dropped


def one_voxel(root: Path, affine: np.ndarray, shape: tuple[int, int, int], bright: tuple[int, int, int]) -> None:
    """A dataset of one volume (Z, H, W), case "case", with a single bright voxel and nothing drawn."""
    image = np.zeros(shape)
    image[bright] = 1000
    path = root / "imagesTr" / "case_0000.nii.gz"
    path.parent.mkdir(parents=True)
    nib.save(nib.Nifti1Image(image.transpose(2, 1, 0).astype(np.int16), affine), path)
    labels = Labels(("background", "one", "two"), 3)
    write_labels(root / "labelsTr" / "case.nii.gz", np.full(shape, 3), read_image(path).geometry)
    write_dataset_json(root, channels=["MRI"], labels=labels, ending=".nii.gz", cases=1)


def place_of(bright: np.ndarray, box: list[float]) -> tuple[float, float]:
    """Centre of the bright pixels of a picture within a box (left, top, width, height)."""
    left, top, width, height = (round(v) for v in box)
    inside = np.zeros_like(bright)
    inside[top : top + height, left : left + width] = bright[top : top + height, left : left + width]
    rows, columns = np.nonzero(inside)
    assert len(rows), f"nothing bright in {box}"
    return float(np.median(columns)), float(np.median(rows))


def tiles(page: Any) -> list[list[float]]:
    """Boxes of the planes on the canvas."""
    read = "rects => rects.map(r => ['x', 'y', 'width', 'height'].map(k => Number(r.getAttribute(k))))"
    found: list[list[float]] = page.eval_on_selector_all("#hud .tile", read)
    return found


def pictures(root: Path, shape: tuple[int, int] = (60, 90), cases: int = 2) -> Path:
    """A dataset of colour pictures: left half red, right half green, blue below."""
    height, width = shape
    rgb = np.zeros((height, width, 3), np.uint8)
    rgb[:, : width // 2, 0], rgb[:, width // 2 :, 1], rgb[height // 2 :, :, 2] = 200, 150, 90
    labels = Labels(("background", "one", "two"), 3)
    for folder in ("imagesTr", "labelsTr"):
        (root / folder).mkdir(parents=True)
    for number in range(1, cases + 1):
        Image.fromarray(rgb).save(root / "imagesTr" / f"photo{number}_0000.png")
        Image.fromarray(np.full(shape, 3, np.uint8)).save(root / "labelsTr" / f"photo{number}.png")
    channels = ["red", "green", "blue"]
    write_dataset_json(root, channels=channels, labels=labels, ending=".png", cases=cases)
    return root


def predict_by_hand(root: Path, case: str, labels: np.ndarray, doubt: np.ndarray) -> None:
    """Store a prediction of a case; doubt is entropy from 0 to 1."""
    workspace = Workspace(root)
    count, slices = workspace.dataset.labels.count, len(labels)
    entropy = (doubt * math.log(count)).astype(np.float32)
    quality = Quality(0.5, (0.5,) * (count - 1), tuple(entropy.mean(axis=(1, 2)).tolist()), (0.0,) * slices)
    found = Examined(labels.astype(np.uint8), entropy, (labels + 1).astype(np.uint8) % count, quality)
    strokes = StrokeStore(workspace).read(case)
    book = PredictionStore(workspace)
    book.write("20200101-000000", case, found, strokes.geometry, workspace.dataset.labels, strokes.array)
