"""Scribbles that walk over superpixels, made once before training."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pclmix.labels import IGNORE

SEGMENTS, COMPACTNESS = 200, 15.0


def superpixels(
    image: npt.NDArray[np.float32], segments: int = SEGMENTS, compactness: float = COMPACTNESS
) -> npt.NDArray[np.int64]:
    """SLIC of an image (C, H, W) in [0, 1] to numbers (H, W) from 0 without a gap.

    The compactness is that of the SLIC paper, for a lightness from 0 to 100; the library works on [0, 1].
    """
    from skimage.segmentation import slic

    numbers = slic(
        image.astype(np.float64),
        n_segments=segments,
        compactness=compactness / 100,
        channel_axis=0,
        convert2lab=False,
        start_label=0,
    )
    return np.unique(numbers, return_inverse=True)[1].reshape(numbers.shape)


def walk_scribbles(numbers: npt.NDArray[np.int64], scribble: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """A superpixel that touches the scribble of exactly one class takes it; the rest keeps what was drawn. (H, W)."""
    classes = int(scribble.max(initial=-1)) + 1
    touched = np.zeros((numbers.max() + 1, max(classes, 1)), dtype=bool)
    drawn = scribble >= 0
    touched[numbers[drawn], scribble[drawn]] = True
    taken = np.where(touched.sum(1) == 1, touched.argmax(1), IGNORE)[numbers]
    return np.where(drawn, scribble, taken).astype(np.int16)
