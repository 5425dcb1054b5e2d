"""Where a stroke would help most: large doubtful places, far from strokes and from each other, and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage

Array = npt.NDArray[Any]
PLACES = 6  #: suggestions at most
_LOOKED_AT = 40  # slices, the least certain ones: a volume of hundreds answers as fast as one of tens
_LEAST = 0.05  # a blurred entropy below this is no doubt
_SHARE = 0.2  # of the best place's score: what scores less is not worth a stroke now
_DOUBTFUL = 0.5  # of ln K: pixels that count as the area of a place
_DEPTH = 15.0  # millimetres across slices within which two places are one
_REPEATED = 0.8  # worth of a place for each better one with the same classes in doubt


def where_next(
    unsure: Array,
    labels: Array,
    second: Array,
    strokes: Array,
    spacing: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> list[dict[str, Any]]:
    """The places where a stroke would help most, best first.

    unsure: (Z, H, W) entropy in bytes; labels, second: the likeliest classes; strokes: classes with IGNORE. A place is
    a peak of the entropy blurred over a fortieth of the image, so that a large doubtful area counts more than a thin
    rim. Doubt at the image's edge, which networks have for lack of context, counts less, and so does doubt beside a
    stroke. Each place has slice z, row y, column x, a score in [0, 1], the two classes in doubt, the doubtful
    pixels around it, and how far the nearest stroke is: in pixels within the slice, or in slices where it has none.
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
    """What belongs to a peak: the area around it that is above a tenth of its height."""
    parts, _ = ndimage.label(plane > score / 10)
    slope: Array = parts == parts[peak]
    return slope


def _worth(unsure: Array, drawn: Array, reach: float) -> Array:
    plane: Array = ndimage.gaussian_filter(unsure.astype(np.float32) / 255, reach, mode="constant")
    if drawn.any():  # a place beside a stroke has been answered already
        near = ndimage.distance_transform_edt(~drawn)
        plane = plane * (1 - np.exp(-0.5 * (near / reach) ** 2))
    return plane


def _edge_weight(height: int, width: int, reach: float) -> Array:
    """0 at the image's edge, slowly rising to 1 at `reach` pixels."""
    y, x = np.arange(height), np.arange(width)
    rows, columns = np.minimum(y, height - 1 - y), np.minimum(x, width - 1 - x)
    weight: Array = np.clip(np.minimum.outer(rows, columns) / reach, 0, 1).astype(np.float32) ** 2
    return weight


def _in_doubt(labels: Array, second: Array, unsure: Array) -> list[int]:
    """The pair of classes that most of the doubt around a place is about."""
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
    """The best places, those about classes that better ones are about already a little later."""
    seen: dict[tuple[int, ...], int] = {}
    for place in places:
        classes = tuple(place["classes"])
        place["worth"] = place["score"] * _REPEATED ** seen.get(classes, 0)
        seen[classes] = seen.get(classes, 0) + 1
    ordered = sorted(places, key=lambda place: -place["worth"])[:PLACES]
    return [{key: value for key, value in place.items() if key != "worth"} for place in ordered]
