"""Slices as pictures inside a page: image, labels in their colours, the truth as a line, uncertainty."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from pclmix.labels import IGNORE, Labels

Array = npt.NDArray[Any]
ZOOM = 3  #: screen pixels for one image pixel, so that a line one screen pixel wide can follow its edges
BACKGROUND_STROKE = "#d9d9d9"


def grey(image: Array) -> Array:
    """(H, W) to RGB (ZOOM H, ZOOM W, 3) in 0 to 1, from the 1st to the 99.5th percentile."""
    low, high = np.percentile(image, (1, 99.5))
    scaled = np.clip((image - low) / max(high - low, 1e-6), 0, 1)
    size = (image.shape[1] * ZOOM, image.shape[0] * ZOOM)
    large = Image.fromarray((255 * scaled).astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
    return np.repeat(np.asarray(large, dtype=np.float64)[..., None] / 255, 3, axis=2)


def paint(base: Array, labels: Array, names: Labels, strength: float = 0.55) -> Array:
    """Lay classes (H, W) over `base`; background only where it is a stroke among pixels not annotated."""
    out, large = base.copy(), enlarge(labels)
    colours = [BACKGROUND_STROKE if (labels == IGNORE).any() else None, *names.colours()[1:]]
    for k, colour in enumerate(colours):
        if colour is not None:
            where = large == k
            out[where] = (1 - strength) * out[where] + strength * rgb(colour)
    return out


def outline(base: Array, truth: Array) -> Array:
    """A white line just inside the edges of each class of `truth` (H, W)."""
    large = enlarge(truth)
    edge = np.zeros(large.shape, dtype=bool)
    for axis in (0, 1):
        for step in (1, -1):
            edge |= (np.roll(large, step, axis) != large) & (large > 0)
    out = base.copy()
    out[edge] = 0.15 * out[edge] + 0.85
    return out


def heat(uncertainty: Array) -> Array:
    """Entropy (H, W) from 0 to ln 2, where two classes are equally likely, in the colours of magma."""
    import matplotlib

    shown = np.clip(uncertainty / math.log(2), 0, 1)
    coloured: Array = matplotlib.colormaps["magma"](enlarge(shown))[..., :3]
    return coloured


def enlarge(array: Array) -> Array:
    return np.repeat(np.repeat(array, ZOOM, axis=0), ZOOM, axis=1)


def rgb(colour: str) -> Array:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def data_uri(picture: Array) -> str:
    """RGB in 0 to 1 as a JPEG inside an address."""
    buffer = io.BytesIO()
    Image.fromarray((255 * np.clip(picture, 0, 1)).round().astype(np.uint8)).save(
        buffer, "JPEG", quality=88, subsampling=0
    )
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
