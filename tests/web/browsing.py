"""What tests in a real browser share: labels on disk, strokes with the mouse, pictures of the canvas."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from PIL import Image


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


def drop(page: Any, *paths: Path) -> None:
    """Files or folders dragged from outside the browser and dropped on the image, as a file manager does."""
    session = page.context.new_cdp_session(page)
    box = page.locator("#view").bounding_box()
    data = {"items": [], "files": [str(p) for p in paths], "dragOperationsMask": 1}
    where = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    for kind in ("dragEnter", "dragOver", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "data": data, **where})
        page.wait_for_timeout(100)  # the page says between two moves whether it takes what is dropped
