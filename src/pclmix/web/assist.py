"""Drawing aids: strokes interpolated between slices, and places where a stroke helps most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage
from scipy.spatial import cKDTree

from pclmix.labels import IGNORE, IntArray

Array = npt.NDArray[Any]
Points = npt.NDArray[np.float64]
# Interpolation
_FARTHEST = 30.0  # maximum distance in mm between two drawn slices: a structure may start and end in a wider gap
_APART = 0.04  # fraction of the image diagonal: strokes farther apart belong to different parts
_UNLIKE = 2.5  # robust standard deviations from the intensities under the strokes of a class
_SAFE = 1.5  # minimum distance in pixels to strokes of other classes

# Suggestions
PLACES = 6  #: maximum number of suggestions
_LOOKED_AT = 40  # slices with the highest mean entropy that are searched: bounds the time for large volumes
_LEAST = 0.05  # minimum blurred entropy of a suggestion
_SHARE = 0.2  # minimum score relative to the best place
_DOUBTFUL = 0.5  # of ln K: pixels above this count towards the area of a place
_DEPTH = 15.0  # mm across slices within which two places are merged
_REPEATED = 0.8  # factor on the score for each better place with the same pair of classes


def fill_between(labels: IntArray, image: npt.NDArray[Any], thickness: float) -> tuple[IntArray, int]:
    """Interpolate strokes between drawn slices: a map (Z, H, W), IGNORE elsewhere, and the number of slices filled.

    labels: (Z, H, W) with IGNORE; image: (C, Z, H, W); thickness: mm between slices.

    For each class and each pair of drawn slices with only empty slices between them, the two strokes are aligned by
    their centroids and each pixel is matched with its nearest neighbour in the other slice. Matched pixels are
    interpolated linearly in the slices between. Pixels whose intensity differs from that under the strokes, and pixels
    near strokes of other classes, are left out. Existing strokes are never changed.
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
    """Pairs of consecutive drawn slices with empty slices between them, at most `farthest` apart."""
    slices = np.flatnonzero(drawn).tolist()
    for first, last in pairwise(slices):
        if 1 < last - first <= farthest:
            yield first, last


def _moved(
    one: npt.NDArray[np.bool_], other: npt.NDArray[np.bool_], first: int, last: int
) -> Iterator[tuple[int, Points]]:
    """Each slice between `first` and `last` with its interpolated points."""
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
    """A predicate for points of a slice (C, H, W): intensities within the range found under the two strokes."""
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
    plane[rows, columns] = np.where((taken >= 0) & (taken != k), -2, k)  # -2: claimed by two classes


def _keep_apart(filled: IntArray, drawn: IntArray) -> None:
    """Remove pixels claimed by two classes and pixels near a stroke of another class."""
    filled[filled == -2] = IGNORE
    before = filled.copy()
    for k in np.unique(before[before >= 0]):
        others = ((before >= 0) & (before != k)) | ((drawn >= 0) & (drawn != k))
        if others.any():
            filled[(before == k) & (ndimage.distance_transform_edt(~others) <= _SAFE)] = IGNORE


def where_next(
    unsure: Array,
    labels: Array,
    second: Array,
    strokes: Array,
    spacing: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> list[dict[str, Any]]:
    """Places where a stroke would help most, best first.

    unsure: (Z, H, W) entropy in bytes; labels, second: most likely and second most likely class; strokes: classes with
    IGNORE. A place is a peak of the entropy blurred with a sigma of 1/40 of the image, so that a large uncertain area
    counts more than a thin boundary. Entropy near the image edge, where networks lack context, and near existing
    strokes is down-weighted. Each place has slice z, row y, column x, a score in [0, 1], the two classes in question,
    the number of uncertain pixels around it, and the distance to the nearest stroke: in pixels within the slice, or in
    slices if the slice has none.
    """
    height, width = unsure.shape[1:]
    reach = max(2.0, min(height, width) / 40)
    edge = _edge_weight(height, width, 3 * reach)
    drawn: Array = np.asarray((strokes >= 0).any(axis=(1, 2)))
    looked_at = np.argsort(-unsure.mean(axis=(1, 2)), kind="stable")[:_LOOKED_AT].tolist()
    planes = {z: _worth(unsure[z], strokes[z] >= 0, reach) * edge for z in looked_at}
    apart = max(1, round(_DEPTH / max(spacing[0], 1e-3)))
    rows, columns = np.ogrid[:height, :width]
    best = {z: float(plane.max()) for z, plane in planes.items()}
    found: list[dict[str, Any]] = []
    while best and len(found) < 2 * PLACES:
        z = max(best, key=lambda k: best[k])
        score = best[z]
        if score < max(_LEAST, _SHARE * (found[0]["score"] if found else 0)):
            break
        y, x = np.unravel_index(int(planes[z].argmax()), (height, width))
        far = (rows - y) ** 2 + (columns - x) ** 2
        near, around = far < (2 * reach) ** 2, far < (4 * reach) ** 2
        place = {"z": z, "y": int(y), "x": int(x), "score": round(score, 3)}
        place["classes"] = _in_doubt(labels[z][near], second[z][near], unsure[z][near])
        place["pixels"] = int((unsure[z][around] > 255 * _DOUBTFUL).sum())
        found.append({**place, **_nearest_stroke(strokes, drawn, z, int(y), int(x))})
        taken = around | (_slope(planes[z], score, (y, x)) & (far < (8 * reach) ** 2))
        for other in [k for k in best if abs(k - z) <= apart]:
            planes[other][taken] = 0
            best[other] = float(planes[other].max())
    return _varied(found)


def _slope(plane: Array, score: float, peak: tuple[Any, ...]) -> Array:
    """The connected area around a peak above a tenth of its height."""
    parts, _ = ndimage.label(plane > score / 10)
    slope: Array = parts == parts[peak]
    return slope


def _worth(unsure: Array, drawn: Array, reach: float) -> Array:
    plane: Array = ndimage.gaussian_filter(unsure.astype(np.float32) / 255, reach, mode="constant")
    if drawn.any():  # places beside a stroke are labelled already
        near = ndimage.distance_transform_edt(~drawn)
        plane = plane * (1 - np.exp(-0.5 * (near / reach) ** 2))
    return plane


def _edge_weight(height: int, width: int, reach: float) -> Array:
    """0 at the image edge, rising to 1 at `reach` pixels."""
    y, x = np.arange(height), np.arange(width)
    rows, columns = np.minimum(y, height - 1 - y), np.minimum(x, width - 1 - x)
    weight: Array = np.clip(np.minimum.outer(rows, columns) / reach, 0, 1).astype(np.float32) ** 2
    return weight


def _in_doubt(labels: Array, second: Array, unsure: Array) -> list[int]:
    """The pair of classes with the largest summed entropy around a place."""
    low, high = np.minimum(labels, second).astype(np.int64), np.maximum(labels, second).astype(np.int64)
    totals = np.bincount(low * 256 + high, weights=unsure.astype(np.float64) + 1e-9)
    pair = int(totals.argmax())
    return sorted({pair // 256, pair % 256})


def _nearest_stroke(strokes: Array, slices: Array, z: int, y: int, x: int) -> dict[str, int | None]:
    if slices[z]:
        rows, columns = np.nonzero(strokes[z] >= 0)
        return {"stroke": round(float(np.sqrt(((rows - y) ** 2 + (columns - x) ** 2).min()))), "slices": 0}
    others = np.flatnonzero(slices)
    return {"stroke": None, "slices": int(np.abs(others - z).min()) if others.size else None}


def _varied(places: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best places, with repeated pairs of classes ranked lower."""
    seen: dict[tuple[int, ...], int] = {}
    for place in places:
        classes = tuple(place["classes"])
        place["worth"] = place["score"] * _REPEATED ** seen.get(classes, 0)
        seen[classes] = seen.get(classes, 0) + 1
    ordered = sorted(places, key=lambda place: -place["worth"])[:PLACES]
    return [{key: value for key, value in place.items() if key != "worth"} for place in ordered]
