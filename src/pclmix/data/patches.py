"""Parts of a large slice: where a sliding window stands, how its predictions are blended, where training crops.

The window moves by half its side at most. Predictions are averaged with a Gaussian weight, for a network knows least
at the border of what it sees. NumPy arrays and tensors are treated alike; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pclmix.labels import IGNORE

#: Step of the sliding window and standard deviation of its Gaussian weight, in sides of a patch.
STEP, SIGMA = 0.5, 0.125
#: Smallest weight relative to the largest, so that corners that one window alone covers keep their precision.
FLOOR = 1e-3
#: Drawn pixels remembered of each class of a slice, to crop around.
PLACES = 16


def starts(length: int, patch: int) -> list[int]:
    """First pixels of the windows along one axis, evenly spread from border to border.

    >>> starts(10, 4), starts(4, 4)
    ([0, 2, 4, 6], [0])
    """
    count = -(-(length - patch) // max(1, int(STEP * patch))) + 1
    return [int(n) for n in np.linspace(0, length - patch, count).round()]


def windows(size: tuple[int, int], patch: tuple[int, int]) -> list[tuple[int, int]]:
    """Top and left of every window over a slice of `size` (H, W)."""
    return [(top, left) for top in starts(size[0], patch[0]) for left in starts(size[1], patch[1])]


@lru_cache(maxsize=32)
def gaussian(patch: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Weights (h, w) of a window's predictions, largest in its middle."""
    rows, columns = (
        np.exp(-0.5 * ((np.arange(side) - (side - 1) / 2) / (SIGMA * side)) ** 2).astype(np.float32) for side in patch
    )
    weight: npt.NDArray[np.float32] = np.maximum(np.outer(rows, columns), FLOOR)
    weight.setflags(write=False)
    return weight


def slide(
    forward: Callable[[Any], Any],
    slices: Any,
    patch: tuple[int, int],
    zeros: Callable[[tuple[int, ...]], Any],
    weight: Any,
) -> Any:
    """Scores (B, K, H, W) of slices (B, C, H, W) from a network that sees patches (B, C, h, w).

    `zeros` makes an array of a shape, and `weight` is `gaussian(patch)`, both of the kind that `forward` returns.
    """
    height, width = slices.shape[-2:]
    total: Any = None
    mass = zeros((height, width))
    for top, left in windows((height, width), patch):
        part = (..., slice(top, top + patch[0]), slice(left, left + patch[1]))
        scores = forward(slices[part])
        if total is None:
            total = zeros((*scores.shape[:2], height, width))
        total[part] += scores * weight
        mass[part] += weight
    return total / mass


class Crops:
    """Where training crops: around a drawn pixel of a class drawn at random from those of the slice.

    Every class of a slice is as likely as every other; a slice without strokes is cropped anywhere.
    """

    def __init__(self, labels: npt.NDArray[np.int16], patch: tuple[int, int], seed: int) -> None:
        """`labels` (N, H, W) are looked at once."""
        self.patch, self.seed, self.size = patch, seed, labels.shape[-2:]
        self.places = [_places(label, np.random.default_rng([seed, n])) for n, label in enumerate(labels)]

    def corner(self, index: int, position: int) -> tuple[int, int]:
        """Top and left of the crop of slice `index` at one place of the training order: a function of both alone."""
        draw = np.random.default_rng([self.seed, 1, position])
        (height, width), (h, w) = self.size, self.patch
        places = self.places[index]
        if not places:
            return int(draw.integers(height - h + 1)), int(draw.integers(width - w + 1))
        chosen = places[int(draw.integers(len(places)))]
        y, x = chosen[int(draw.integers(len(chosen)))]
        top, left = int(y) - int(draw.integers(h)), int(x) - int(draw.integers(w))
        return min(max(top, 0), height - h), min(max(left, 0), width - w)


def _places(label: npt.NDArray[np.int16], draw: np.random.Generator) -> list[npt.NDArray[np.int64]]:
    """Up to PLACES drawn pixels (y, x) of each class of a slice (H, W)."""
    rows, columns = np.nonzero(label != IGNORE)
    classes = label[rows, columns]
    found = []
    for k in np.unique(classes):
        own = np.flatnonzero(classes == k)
        own = own if len(own) <= PLACES else draw.choice(own, PLACES, replace=False)
        found.append(np.stack([rows[own], columns[own]], axis=1))
    return found
