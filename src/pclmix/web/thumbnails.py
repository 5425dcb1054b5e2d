"""Small pictures for the list of cases: the middle slice, in colour where the image has colour."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from pclmix.io.files import atomic_path
from pclmix.io.volume import read_image
from pclmix.web.cases import as_colour
from pclmix.web.workspace import Workspace, is_full, token_of

SIDE = 96  #: pixels of the longer side; shown at half of that
_TAILS = (1, 99)  # percentiles of the slice that become black and white


def thumbnail(workspace: Workspace, case: str) -> bytes:
    """PNG of a case, kept in .pclmix/thumbnails as long as its image is the same file."""
    source = workspace.image_paths(case)[0]
    kept = workspace.corner("thumbnails", f"{case}-{token_of(source)}.png")
    if kept.is_file():
        return kept.read_bytes()
    content = _draw(source)
    for old in kept.parent.glob(f"{_literal(case)}-*-*-*.png") if kept.parent.is_dir() else ():
        old.unlink(missing_ok=True)
    try:
        with atomic_path(kept) as temporary:
            temporary.write_bytes(content)
    except Exception as error:
        if not is_full(error):
            raise
    return content


def _draw(source: Path) -> bytes:
    volume = read_image(source)
    middle = volume.array[:, volume.array.shape[1] // 2 : volume.array.shape[1] // 2 + 1]
    plane: npt.NDArray[Any]
    if len(middle) == 3:
        plane = as_colour(middle)[0].view(np.uint8).reshape(*middle.shape[2:], 3)
        size = middle.shape[2:]
    else:
        grey = middle[0, 0].astype(np.float32)
        low, high = np.percentile(grey, _TAILS)
        plane = np.clip((grey - low) * (255 / max(float(high - low), 1e-9)), 0, 255).astype(np.uint8)
        size = tuple(n * s for n, s in zip(grey.shape, volume.geometry.spacing[1:], strict=True))
    scale = SIDE / max(size)
    picture = Image.fromarray(plane).resize((max(1, round(size[1] * scale)), max(1, round(size[0] * scale))))
    if source.name.lower().endswith((".nii", ".nii.gz")):
        picture = _upright(picture, volume.geometry.affine)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _upright(picture: Image.Image, affine: npt.NDArray[Any]) -> Image.Image:
    """As the page shows it: anterior or superior at the top, the patient's left on the right."""
    direction = affine[:3, :2] / np.maximum(np.linalg.norm(affine[:3, :2], axis=0), 1e-9)
    column, row = (int(np.abs(direction[:, k]).argmax()) for k in (0, 1))
    signs = [float(direction[column, 0]), float(direction[row, 1])]
    if column > row:  # the axis that belongs at the top runs along columns
        picture = picture.transpose(Image.Transpose.TRANSPOSE)
        column, row, signs = row, column, signs[::-1]
    if (column == 0) == (signs[0] > 0):  # x to the right of the patient is shown to the left, y and z as they are
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if signs[1] > 0:
        picture = picture.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    return picture


def _literal(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)
