"""Dice, HD95 and ASSD of two masks, by the usual definition of the field, and what they are where a mask is empty.

The surface of a mask is what one erosion with the cross-shaped neighbourhood takes away; outside of the image there
is nothing, so voxels on its border are surface. Each surface voxel has a distance in millimetres, centre to centre,
to the nearest surface voxel of the other mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.spatial import cKDTree

Mask = npt.NDArray[np.bool_]
Distances = npt.NDArray[np.float64]
Status = Literal["scored", "empty prediction", "absent", "predicted where absent"]

#: HD95 of an empty prediction of a present class, in the column that compares with published tables.
EMPTY_HD95 = 50.0
NAN = float("nan")


@dataclass(frozen=True)
class Scores:
    """One class of one case; `dice` is 0 to 1, distances are mm, volumes ml."""

    status: Status
    dice: float
    hd95: float  #: NaN where either mask is empty
    hd95_50: float  #: as `hd95`, and 50 for an empty prediction of a present class
    assd: float
    volume_ml: float
    reference_ml: float


def score(prediction: Mask, reference: Mask, spacing: Sequence[float]) -> Scores:
    """All measures of one class, with the policy for empty masks.

    | prediction | reference | Dice | HD95 | HD95 with 50 |
    |---|---|---|---|---|
    | empty | present | 0 | NaN | 50 |
    | empty | absent | NaN | NaN | NaN |
    | present | absent | 0 | NaN | NaN |
    """
    volumes = volume_ml(prediction, spacing), volume_ml(reference, spacing)
    predicted, present = bool(volumes[0]), bool(volumes[1])
    if predicted and present:
        there, back = surface_distances(prediction, reference, spacing)
        hd = _hd95(there, back)
        return Scores("scored", dice(prediction, reference), hd, hd, _assd(there, back), *volumes)
    if present:
        return Scores("empty prediction", 0.0, NAN, EMPTY_HD95, NAN, *volumes)
    if predicted:
        return Scores("predicted where absent", 0.0, NAN, NAN, NAN, *volumes)
    return Scores("absent", NAN, NAN, NAN, NAN, *volumes)


def dice(prediction: Mask, reference: Mask) -> float:
    """2 |P and R| / (|P| + |R|), 0 to 1; NaN where both are empty."""
    total = np.count_nonzero(prediction) + np.count_nonzero(reference)
    return 2.0 * np.count_nonzero(prediction & reference) / total if total else NAN


def hd95(prediction: Mask, reference: Mask, spacing: Sequence[float]) -> float:
    """The 95th percentile of the surface distances of both directions together, mm; NaN where a mask is empty."""
    return _hd95(*surface_distances(prediction, reference, spacing))


def assd(prediction: Mask, reference: Mask, spacing: Sequence[float]) -> float:
    """The mean of the two directed mean surface distances, mm; NaN where a mask is empty."""
    return _assd(*surface_distances(prediction, reference, spacing))


def volume_ml(mask: Mask, spacing: Sequence[float]) -> float:
    """Voxels times voxel size, in millilitres; a 2D mask counts as 1 mm thick."""
    return float(np.count_nonzero(mask)) * float(np.prod(spacing)) / 1000.0


def surface_distances(first: Mask, second: Mask, spacing: Sequence[float]) -> tuple[Distances, Distances]:
    """Distances (N1,), (N2,) of each mask's surface voxels to the other's surface, in mm; both empty if a mask is.

    Only surface voxels are looked at, through a tree of points: a stray island in the corner of the image makes the
    box around both masks as large as the image, and a distance transform of it ten times as slow.
    """
    _check(first, second, spacing)
    if not first.any() or not second.any():
        return np.empty(0), np.empty(0)
    points1, points2 = surface_points(first), surface_points(second)
    return _to_nearest(points1, points2, first.shape, spacing), _to_nearest(points2, points1, first.shape, spacing)


def surface_points(mask: Mask) -> npt.NDArray[np.int64]:
    """Indices (N, ndim) of the surface voxels of a mask that is not empty."""
    box = _box(mask)
    inside = mask[box]
    core = inside.copy()
    for axis in range(mask.ndim):
        line, source = np.moveaxis(core, axis, 0), np.moveaxis(inside, axis, 0)
        line[1:] &= source[:-1]
        line[:-1] &= source[1:]
        line[0] = line[-1] = False  # beyond the box of the mask there is no mask
    surface = inside & ~core
    found = np.unravel_index(np.flatnonzero(surface), surface.shape)
    return np.stack([index + part.start for index, part in zip(found, box, strict=True)], axis=1).astype(np.int64)


def _to_nearest(
    points: npt.NDArray[np.int64], others: npt.NDArray[np.int64], shape: tuple[int, ...], spacing: Sequence[float]
) -> Distances:
    distances = np.zeros(len(points))
    shared = np.zeros(shape, dtype=bool)
    shared[tuple(others.T)] = True
    apart = ~shared[tuple(points.T)]  # a voxel on both surfaces is at distance 0 without a search
    if apart.any():
        mm = np.asarray(spacing, dtype=np.float64)
        # Points of a grid are spread evenly: the simple tree is built faster and searched as fast.
        tree = cKDTree(others * mm, balanced_tree=False, compact_nodes=False)
        distances[apart] = tree.query(points[apart] * mm)[0]
    return distances


def _box(mask: Mask) -> tuple[slice, ...]:
    """The smallest box around a mask that is not empty."""
    box: list[slice] = []
    for axis in range(mask.ndim):
        line = np.flatnonzero(mask.any(axis=tuple(a for a in range(mask.ndim) if a != axis)))
        box.append(slice(int(line[0]), int(line[-1]) + 1))
    return tuple(box)


def _hd95(there: Distances, back: Distances) -> float:
    return float(np.percentile(np.hstack((there, back)), 95)) if len(there) else NAN


def _assd(there: Distances, back: Distances) -> float:
    return float((there.mean() + back.mean()) / 2) if len(there) else NAN


def _check(first: npt.NDArray[Any], second: npt.NDArray[Any], spacing: Sequence[float]) -> None:
    if first.shape != second.shape:
        raise ValueError(f"masks must have one shape, got {first.shape} and {second.shape}")
    if first.dtype != np.bool_ or second.dtype != np.bool_:
        raise ValueError(f"masks must be boolean, got {first.dtype} and {second.dtype}")
    if len(spacing) != first.ndim or not all(s > 0 for s in spacing):
        raise ValueError(f"spacing must be {first.ndim} positive numbers, got {tuple(spacing)}")
