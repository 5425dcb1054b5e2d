"""Dense pseudo labels of one slice by a random walker from its scribbles, made once before training."""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt

from pclmix.labels import IGNORE

BETA = 100.0
#: Intensities are taken from this range to [-1, 1], as in the example of the library that the field follows.
RANGE = (-0.35, 1.35)


def random_walker_labels(
    image: npt.NDArray[np.float32], scribble: npt.NDArray[np.int16], beta: float = BETA
) -> npt.NDArray[np.int16]:
    """The class whose scribble a random walker from each pixel reaches first; (H, W).

    image: (C, H, W) in [0, 1]. scribble: (H, W). Only classes that were drawn can appear, each under its own number.
    Where one class was drawn there is no walk to decide: background alone fills the slice, any other class stays what
    was drawn. Nothing drawn: nothing known.
    """
    from skimage.segmentation import random_walker

    classes = np.unique(scribble[scribble >= 0])
    if len(classes) < 2:
        return np.zeros_like(scribble) if classes.tolist() == [0] else scribble.copy()
    # The library numbers what it finds anew; so numbers without a gap go in and the classes are looked up after.
    seeds = np.where(scribble >= 0, np.searchsorted(classes, scribble) + 1, 0)
    low, high = RANGE
    scaled = (np.clip(image, low, high) - low) / (high - low) * 2 - 1
    if not (seeds == 0).any() or scaled.std() == 0:
        return _nearest(seeds, classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of probabilities a rounding outside [0, 1]
        # "bf" factors the Laplacian once for all classes: at 256x256 20 times faster here than conjugate gradients.
        found = random_walker(scaled.astype(np.float64), seeds, beta=beta, mode="bf", channel_axis=0)
    walked: npt.NDArray[np.int16] = np.where(found > 0, classes[np.maximum(found, 1) - 1], IGNORE).astype(np.int16)
    return walked


def _nearest(seeds: npt.NDArray[np.int64], classes: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """On a slice of one grey value only distance is left to go by."""
    from scipy import ndimage

    place = ndimage.distance_transform_edt(seeds == 0, return_distances=False, return_indices=True)
    found: npt.NDArray[np.int16] = classes[seeds[tuple(place)] - 1].astype(np.int16)
    return found
