"""Strokes for the slices between two drawn ones, so that a structure is drawn on every few slices only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage
from scipy.spatial import cKDTree

from pclmix.labels import IGNORE, IntArray

Points = npt.NDArray[np.float64]
_FARTHEST = 30.0  # millimetres between two drawn slices, at most: beyond, a structure may have come and gone
_APART = 0.04  # of the image's diagonal: strokes that moved farther are not of the same part
_UNLIKE = 2.5  # standard deviations from the strokes of a class, beyond which a pixel looks like something else
_SAFE = 1.5  # pixels that a filled-in stroke keeps from one of another class


def fill_between(labels: IntArray, image: npt.NDArray[Any], thickness: float) -> tuple[IntArray, int]:
    """Strokes (Z, H, W) filled in between drawn slices, IGNORE elsewhere, and how many slices got some.

    labels: (Z, H, W) with IGNORE; image: (C, Z, H, W); thickness: millimetres from slice to slice.

    For each class, between two slices where it is drawn and none between them is, each pixel of one slice's stroke
    moves to its nearest neighbour in the other, once both strokes are centred on each other; a slice in between gets
    what has moved its share of the way, from both sides. Pixels near a stroke of another class, drawn or filled in,
    are left open, and so are strokes without a partner close by. Nothing drawn is changed.
    """
    filled = np.full_like(labels, IGNORE)
    for k in range(int(labels.max(initial=IGNORE)) + 1):
        for first, last in _gaps((labels == k).any(axis=(1, 2)), max(2, int(_FARTHEST / thickness))):
            strokes = labels[first] == k, labels[last] == k
            alike = _looks_like(image[:, first], image[:, last], *strokes)
            for z, points in _moved(*strokes, first, last):
                _draw(filled[z], points[alike(image[:, z], points)], k)
    filled[labels >= 0] = IGNORE
    for touched in np.flatnonzero((filled >= 0).any(axis=(1, 2))).tolist():
        _keep_apart(filled[touched], labels[touched])
    return filled, int((filled >= 0).any(axis=(1, 2)).sum())


def _gaps(drawn: npt.NDArray[np.bool_], farthest: int) -> Iterator[tuple[int, int]]:
    """Neighbouring drawn slices with empty ones between them, at most `farthest` apart."""
    slices = np.flatnonzero(drawn).tolist()
    for first, last in pairwise(slices):
        if 1 < last - first <= farthest:
            yield first, last


def _moved(
    one: npt.NDArray[np.bool_], other: npt.NDArray[np.bool_], first: int, last: int
) -> Iterator[tuple[int, Points]]:
    """The slices between, each with the points that have moved their share of the way."""
    near = _APART * float(np.hypot(*one.shape))
    a, b = (np.argwhere(mask).astype(np.float64) for mask in (one, other))
    shift = b.mean(axis=0) - a.mean(axis=0)
    if np.hypot(*shift) > near:
        return
    to_b, to_a = cKDTree(b - shift).query(a), cKDTree(a).query(b - shift)
    starts = np.concatenate([a[to_b[0] <= near], a[to_a[1]][to_a[0] <= near]])
    ends = np.concatenate([b[to_b[1]][to_b[0] <= near], b[to_a[0] <= near]])
    for z in range(first + 1, last):
        share = (z - first) / (last - first)
        yield z, starts + (ends - starts) * share


def _looks_like(
    first: npt.NDArray[Any], last: npt.NDArray[Any], *strokes: npt.NDArray[np.bool_]
) -> Callable[[npt.NDArray[Any], Points], npt.NDArray[np.bool_]]:
    """A test of points of a slice (C, H, W): whether each has the intensities that the two strokes have."""
    values = np.concatenate([_smooth(plane)[:, drawn] for plane, drawn in zip((first, last), strokes, strict=True)], 1)
    middle = np.median(values, axis=1, keepdims=True)
    spread = 1.4826 * np.median(np.abs(values - middle), axis=1, keepdims=True)
    spread = np.maximum(spread, 1e-6 + 0.02 * np.abs(middle))

    def alike(plane: npt.NDArray[Any], points: Points) -> npt.NDArray[np.bool_]:
        rows, columns = np.rint(points).astype(np.int64).T
        found: npt.NDArray[np.bool_] = (np.abs(_smooth(plane)[:, rows, columns] - middle) <= _UNLIKE * spread).all(0)
        return found

    return alike


def _smooth(plane: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    smooth: npt.NDArray[np.float32] = ndimage.gaussian_filter(plane.astype(np.float32), (0, 1, 1))
    return smooth


def _draw(plane: IntArray, points: Points, k: int) -> None:
    rows, columns = np.rint(points).astype(np.int64).T
    taken = plane[rows, columns]
    plane[rows, columns] = np.where((taken >= 0) & (taken != k), -2, k)  # -2: two classes want it


def _keep_apart(filled: IntArray, drawn: IntArray) -> None:
    """Leave open what two classes want, and what is near a stroke of another class."""
    filled[filled == -2] = IGNORE
    before = filled.copy()
    for k in np.unique(before[before >= 0]):
        others = ((before >= 0) & (before != k)) | ((drawn >= 0) & (drawn != k))
        if others.any():
            filled[(before == k) & (ndimage.distance_transform_edt(~others) <= _SAFE)] = IGNORE
