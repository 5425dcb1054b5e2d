"""Connected parts of a label map in 3D."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage

Array = npt.NDArray[Any]


def largest_component(labels: Array, classes: Iterable[int]) -> Array:
    """Keep the largest 3D component of each class of `labels` (Z, H, W); its other voxels become background, 0.

    Voxels that touch by a corner are connected: slices lie far apart, and the heart moves sideways between them.
    A class that is absent stays absent; of two components of one size the first in array order is kept. The input
    is not changed.

    >>> largest_component(np.array([[[1, 1, 0, 1, 2]]]), (1, 2)).tolist()
    [[[1, 1, 0, 0, 2]]]
    """
    kept = labels.copy()
    touching = np.ones((3,) * labels.ndim, dtype=bool)
    for k in classes:
        parts, count = ndimage.label(labels == k, structure=touching)
        if count > 1:
            sizes = np.bincount(parts.ravel())[1:]
            kept[(parts > 0) & (parts != 1 + int(sizes.argmax()))] = 0
    return kept
