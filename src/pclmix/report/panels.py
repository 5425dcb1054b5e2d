"""Slices as pictures: the image in grey or colour, labels over it, outlines, uncertainty."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from pclmix.io.volume import Volume
from pclmix.labels import IGNORE, Labels

Array = npt.NDArray[Any]
BACKGROUND_STROKE = "#d9d9d9"
#: Not in the palette of the classes.
ERROR = "#ff3df2"
_SIDE = 900  #: pixels of the longer side up to which a picture is enlarged


def slice_name(z: int, count: int) -> str:
    """`slice 3 of 10`; nothing for the only slice of a picture.

    >>> slice_name(2, 10), slice_name(0, 1)
    ('slice 3 of 10', '')
    """
    return f"slice {z + 1} of {count}" if count > 1 else ""


def zoom_of(shape: tuple[int, ...]) -> int:
    """Screen pixels for one image pixel (..., H, W): a line one screen pixel wide can then follow its edges."""
    return max(1, min(3, _SIDE // max(shape[-2:])))


def window(volume: Volume) -> tuple[float, float]:
    """The intensities shown as black and as white, for all slices."""
    if volume.is_colour and volume.array.dtype == np.uint8:
        return 0.0, 255.0
    low, high = np.percentile(volume.array if volume.is_colour else volume.array[0], (1, 99.5))
    return float(low), float(high)


def base(volume: Volume, z: int, limits: tuple[float, float] | None = None) -> Array:
    """Slice `z` as RGB (zoom H, zoom W, 3) in 0 to 1: colour pictures in colour, else the first channel in grey."""
    low, high = limits or window(volume)
    image = volume.array[:, z] if volume.is_colour else volume.array[:1, z]
    scaled = (255 * np.clip((image - low) / max(high - low, 1e-6), 0, 1)).astype(np.uint8)
    zoom = zoom_of(image.shape)
    size = (image.shape[2] * zoom, image.shape[1] * zoom)
    channels = [np.asarray(Image.fromarray(c).resize(size, Image.Resampling.BICUBIC)) / 255 for c in scaled]
    return np.stack(channels * (3 // len(channels)), axis=2)


def paint(picture: Array, labels: Array, names: Labels, strength: float = 0.55) -> Array:
    """Lay classes (H, W) over a picture; the background only where it is a stroke among pixels without annotation."""
    out, large = picture.copy(), enlarge(labels)
    colours = [BACKGROUND_STROKE if (labels == IGNORE).any() else None, *names.colours()[1:]]
    for k, colour in enumerate(colours):
        if colour is not None:
            where = large == k
            out[where] = (1 - strength) * out[where] + strength * rgb(colour)
    return out


def outline(picture: Array, regions: Array, colour: str = "#ffffff", width: int = 1) -> Array:
    """Draw a line of `width` screen pixels just inside the edges of each region (H, W) that is not 0."""
    large = np.pad(enlarge(regions), width)
    edge = np.zeros(large.shape, dtype=bool)
    for axis in (0, 1):
        for step in range(-width, width + 1):
            edge |= (np.roll(large, step, axis) != large) & (large > 0)
    edge = edge[width:-width, width:-width]
    out = picture.copy()
    out[edge] = 0.15 * out[edge] + 0.85 * rgb(colour)
    return out


def heat(uncertainty: Array) -> Array:
    """Entropy (H, W) from 0 to ln 2, where two classes are equally likely, in the colours of magma."""
    import matplotlib

    coloured: Array = matplotlib.colormaps["magma"](enlarge(np.clip(uncertainty / math.log(2), 0, 1)))[..., :3]
    return coloured


def enlarge(array: Array) -> Array:
    """Repeat the pixels of (H, W) as often as `base` does."""
    zoom = zoom_of(array.shape)
    return np.repeat(np.repeat(array, zoom, axis=0), zoom, axis=1)


def rgb(colour: str) -> Array:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
