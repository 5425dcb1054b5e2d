"""The one preprocessing of training, prediction and export: intensities to [0, 1], working size, patches.

Images are resized linearly (averaged when shrinking). Labels are never interpolated, and drawn lines survive
shrinking. Resizing is two small matrices, R_h @ image @ R_w^T: one definition for NumPy and for tensors on any device.
Almost all weights are zero, and NumPy adds only the others. A matrix product would also start the threads of its
library, which spin and take cores from the network: prediction took 1.4 times as long.

A sliding window moves by half its side at most. Predictions are averaged with a Gaussian weight, since a network is
least accurate at the border of its input. NumPy arrays and tensors are treated alike; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pclmix.labels import IGNORE

Range = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
Aspect = Literal["keep", "stretch"]
Intensity = Literal["slice", "volume", "window"]
#: Axes of (B, C, H, W) that test-time augmentation flips: none, W, H, both.
FLIPS: tuple[tuple[int, ...], ...] = ((), (3,), (2,), (2, 3))
#: Above this share of labelled pixels a slice is a map of regions, not of strokes.
_REGIONS = 0.5


@dataclass(frozen=True)
class Frame:
    """Position of an image in the padded working image: rows top to top + height, columns left to left + width."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Preprocessing:
    """Converts slices to network input.

    With aspect `keep` a slice is scaled to fit into `size`, centred and padded: 0 in images, IGNORE in labels. With
    `stretch` it fills `size`. Intensities are scaled per slice or per volume, or from the fixed `window` (low, high) in
    the image's own unit, as CT is.
    """

    size: tuple[int, int]
    intensity: Intensity = "slice"
    aspect: Aspect = "keep"
    window: tuple[float, float] | None = field(default=None, kw_only=True)

    def frame(self, shape: tuple[int, int]) -> Frame:
        """Position of slices of `shape` (H, W) in the working image."""
        h, w = self.size
        if self.aspect == "stretch":
            return Frame(0, 0, h, w)
        factor = min(h / shape[0], w / shape[1])
        height, width = (min(max(1, round(n * factor)), m) for n, m in zip(shape, self.size, strict=True))
        return Frame((h - height) // 2, (w - width) // 2, height, width)

    def images(self, array: npt.NDArray[Any], limits: Range | None = None) -> npt.NDArray[np.float32]:
        """An image (C, Z, H, W) as the network sees it: slices (Z, C, *size) in [0, 1].

        `limits` are given where `array` is a part of the volume that they were taken from.
        """
        frame = self.frame((array.shape[-2], array.shape[-1]))
        scaled = resize_linear(normalise(array, self.intensity, limits, self.window), (frame.height, frame.width))
        return _padded(scaled.swapaxes(0, 1), self.size, frame, 0)

    def labels(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Labels (Z, H, W) with IGNORE at working size, (Z, *size)."""
        return _padded(self.reduced(array), self.size, self.frame((array.shape[-2], array.shape[-1])), IGNORE)

    def reduced(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`labels` without the padding."""
        frame = self.frame((array.shape[-2], array.shape[-1]))
        return reduce_labels(array, (frame.height, frame.width))

    def restored(self, scores: npt.NDArray[Any], shape: tuple[int, int]) -> npt.NDArray[np.float32]:
        """Scores (..., *size) of the network back at the image's own `shape`, without the padding."""
        f = self.frame(shape)
        return resize_linear(scores[..., f.top : f.top + f.height, f.left : f.left + f.width], shape)

    def restoring_matrices(self, shape: tuple[int, int]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """`restored` as R_h @ scores @ R_w^T, without weight on padding: (H, h) and (W, w)."""
        f = self.frame(shape)
        return (
            _wider(linear_matrix(f.height, shape[0]), self.size[0], f.top),
            _wider(linear_matrix(f.width, shape[1]), self.size[1], f.left),
        )


def intensity_range(array: npt.NDArray[Any], intensity: str) -> Range:
    """Lowest and highest value of (C, Z, H, W), per channel and slice or per channel and volume, axes kept."""
    axes = (2, 3) if intensity == "slice" else (1, 2, 3)
    low, high = array.min(axis=axes, keepdims=True), array.max(axis=axes, keepdims=True)
    return low.astype(np.float32), high.astype(np.float32)


def normalise(
    array: npt.NDArray[Any],
    intensity: str,
    limits: Range | None = None,
    window: tuple[float, float] | None = None,
) -> npt.NDArray[np.float32]:
    """Intensities (C, Z, H, W) to [0, 1], per channel and slice or per channel and volume; constant becomes 0.

    `window` is the range of intensity `window`; what lies outside it is cut off.
    """
    if intensity == "window":
        assert window is not None  # validated by the configuration and the model's description
        bottom, top = np.float32(window[0]), np.float32(window[1])
        cut: npt.NDArray[np.float32] = np.clip((array.astype(np.float32) - bottom) / (top - bottom), 0, 1)
        return cut
    low, high = limits or intensity_range(array, intensity)
    span = high - low
    array = array.astype(np.float32)
    scaled: npt.NDArray[np.float32] = np.divide(array - low, span, out=np.zeros_like(array), where=span > 0)
    return scaled


@lru_cache(maxsize=256)
def linear_matrix(source: int, target: int) -> npt.NDArray[np.float32]:
    """Weights (target, source) of linear interpolation; rows sum to one.

    Pixel centres sit at (i + 0.5) / n, so corners line up at every size. Shrinking averages (antialiased triangle).

    >>> linear_matrix(2, 4).round(2).tolist()
    [[1.0, 0.0], [0.75, 0.25], [0.25, 0.75], [0.0, 1.0]]
    """
    scale = source / target
    width = max(scale, 1.0)  # the triangle widens when shrinking, so that every source pixel counts
    centres = (np.arange(target) + 0.5) * scale - 0.5
    distance = np.abs(np.arange(source)[None, :] - centres[:, None]) / width
    weights = np.clip(1.0 - distance, 0.0, None)
    matrix: npt.NDArray[np.float32] = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    matrix.setflags(write=False)
    return matrix


def resize_linear(array: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Resize (..., H, W) to (..., *size) in float32."""
    h, w = array.shape[-2:]
    array = array.astype(np.float32, copy=False)
    if (h, w) == tuple(size):
        return array
    index, weight = _taps(h, size[0])
    rows = sum(array[..., i, :] * part[:, None] for i, part in zip(index, weight, strict=True))
    index, weight = _taps(w, size[1])
    resized: npt.NDArray[np.float32] = sum(rows[..., i] * part for i, part in zip(index, weight, strict=True))
    return resized


@lru_cache(maxsize=256)
def _taps(source: int, target: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The weights of linear_matrix that are not zero: sources and weights (T, target), filled up with zeros."""
    matrix = linear_matrix(source, target)
    count = int((matrix > 0).sum(axis=1).max())
    index = np.argsort(-matrix, axis=1, kind="stable")[:, :count]
    return np.ascontiguousarray(index.T), np.ascontiguousarray(np.take_along_axis(matrix, index, axis=1).T)


def nearest_index(source: int, target: int) -> npt.NDArray[np.int64]:
    """The source pixel under each target pixel's centre.

    >>> nearest_index(4, 2).tolist(), nearest_index(2, 4).tolist()
    ([1, 3], [0, 0, 1, 1])
    """
    return np.minimum((np.arange(target) + 0.5) * source / target, source - 1).astype(np.int64)


def resize_nearest(array: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[Any]:
    """Resize labels (..., H, W) to (..., *size) by nearest neighbour."""
    h, w = array.shape[-2:]
    return array[..., nearest_index(h, size[0])[:, None], nearest_index(w, size[1])[None, :]]


def target_index(source: int, target: int) -> npt.NDArray[np.int64]:
    """The target pixel that holds each source pixel's centre.

    >>> target_index(4, 2).tolist(), target_index(2, 4).tolist()
    ([0, 0, 1, 1], [1, 3])
    """
    return np.minimum((np.arange(source) + 0.5) * target / source, target - 1).astype(np.int64)


def reduce_labels(labels: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[Any]:
    """Resize labels (Z, H, W) with IGNORE to (Z, *size) such that every drawn line stays a line of its class.

    A target pixel takes the class of the strokes whose pixels it holds. Of several classes, the one that covers the
    fewest target pixels of the slice gets it. Enlarging repeats pixels. A slice that is mostly labelled holds regions
    instead of strokes and is sampled at pixel centres. In both cases each class of a slice keeps at least one pixel, if
    necessary a neighbouring one, as long as there are as many pixels as classes.
    """
    h, w = size
    grown = resize_nearest(labels, (max(h, labels.shape[1]), max(w, labels.shape[2])))
    if grown.shape[1:] == (h, w):
        return grown
    out = np.full((len(grown), h, w), IGNORE, labels.dtype)
    row, column = target_index(grown.shape[1], h), target_index(grown.shape[2], w)
    for label, target in zip(grown, out, strict=True):
        y, x = np.nonzero(label >= 0)
        if not len(y):
            continue
        count = int(label.max()) + 1
        pair, pixels = np.unique((row[y] * w + column[x]) * count + label[y, x], return_counts=True)
        cell, k = np.divmod(pair, count)
        flat = target.reshape(-1)
        if len(y) > _REGIONS * label.size:
            target[:] = resize_nearest(label, size)
        else:
            covered = np.bincount(k, minlength=count)
            order = np.lexsort((pixels, -covered[k]))
            flat[cell[order]] = k[order]  # a repeated index takes the last value: that of the rarest class
        _rescue(target, cell, k, pixels)
    return out


def _rescue(
    target: npt.NDArray[Any], cell: npt.NDArray[np.int64], k: npt.NDArray[np.int64], pixels: npt.NDArray[np.int64]
) -> None:
    """Give each lost class the pixel that holds most of it, or else the nearest one; no other class loses its last."""
    flat = target.reshape(-1)
    left = np.bincount(flat[flat >= 0], minlength=int(k.max()) + 1)
    for lost in np.unique(k):
        if left[lost]:
            continue
        own = np.flatnonzero(k == lost)
        places = cell[own[np.argsort(-pixels[own], kind="stable")]]
        free = (flat < 0) | (left[flat] > 1)
        place = next(iter(places[free[places]]), None)
        if place is None:
            around = np.flatnonzero(free)
            if not len(around):
                continue
            width = target.shape[1]
            away = np.hypot(around // width - places[0] // width, around % width - places[0] % width)
            place = around[away.argmin()]
        if flat[place] >= 0:
            left[flat[place]] -= 1
        left[lost] += 1
        flat[place] = lost


def kept_pixels(labels: npt.NDArray[Any], reduced: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """Number of drawn pixels of labels (Z, H, W), per class, that `reduced` (Z, h, w) preserves: (count,)."""
    z, y, x = np.nonzero(labels >= 0)
    row = target_index(labels.shape[1], reduced.shape[1])[y]
    column = target_index(labels.shape[2], reduced.shape[2])[x]
    drawn = labels[z, y, x]
    return np.bincount(drawn[reduced[z, row, column] == drawn], minlength=count)


def _padded(array: npt.NDArray[Any], size: tuple[int, int], frame: Frame, value: float) -> npt.NDArray[Any]:
    if array.shape[-2:] == tuple(size):
        return array
    out = np.full((*array.shape[:-2], *size), value, array.dtype)
    out[..., frame.top : frame.top + frame.height, frame.left : frame.left + frame.width] = array
    return out


def _wider(matrix: npt.NDArray[np.float32], columns: int, first: int) -> npt.NDArray[np.float32]:
    """The same matrix with columns of zeros on both sides."""
    out = np.zeros((matrix.shape[0], columns), np.float32)
    out[:, first : first + matrix.shape[1]] = matrix
    return out


#: Step of the sliding window and standard deviation of its Gaussian weight, in sides of a patch.
STEP, SIGMA = 0.5, 0.125
#: Smallest weight relative to the largest, so that corners covered by a single window keep their precision.
FLOOR = 1e-3
#: Drawn pixels kept per class and slice as crop centres.
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
    """Positions of training crops: around a drawn pixel of a random class of the slice.

    Every class of a slice is as likely as every other; a slice without strokes is cropped anywhere.
    """

    def __init__(self, labels: npt.NDArray[np.int16], patch: tuple[int, int], seed: int) -> None:
        """`labels` (N, H, W) are read once."""
        self.patch, self.seed, self.size = patch, seed, labels.shape[-2:]
        self.places = [_places(label, np.random.default_rng([seed, n])) for n, label in enumerate(labels)]

    def corner(self, index: int, position: int) -> tuple[int, int]:
        """Top and left of the crop of slice `index` at one position of the training order; depends on nothing else."""
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
