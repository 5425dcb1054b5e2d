"""Hand-like lines inside a region: level sets of a perturbed distance, centre-lines, zigzags.

A curve is (n, 2), float, in pixels (row, column). A region is a boolean map (H, W).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage, sparse
from scipy.sparse import csgraph
from skimage.measure import find_contours
from skimage.morphology import skeletonize

Mask = npt.NDArray[np.bool_]
Field = npt.NDArray[np.float64]
Curve = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.int64]


def wobble(shape: tuple[int, int], period: float, rng: np.random.Generator) -> Field:
    """A smooth random field of unit variance whose bumps are about `period` pixels long: six plane waves."""
    angle, phase = rng.uniform(0, 2 * np.pi, (2, 6))
    frequency = 2 * np.pi / (period * rng.uniform(0.7, 2.0, 6))
    rows = np.multiply.outer(np.arange(shape[0]), frequency * np.sin(angle)) + phase
    columns = np.multiply.outer(np.arange(shape[1]), frequency * np.cos(angle))
    waves = np.cos(rows) @ np.cos(columns).T - np.sin(rows) @ np.sin(columns).T  # cos(row part + column part)
    return np.asarray(waves / np.sqrt(3.0))


def depth(region: Mask) -> Field:
    """Distance in pixels to the nearest pixel outside the region; the picture's edge counts as outside."""
    return np.asarray(ndimage.distance_transform_edt(np.pad(region, 1))[1:-1, 1:-1])


def level_set(field: Field, level: float) -> list[Curve]:
    """The curves along which `field` takes the value `level`, longest first; none in a picture one pixel wide."""
    if min(field.shape) < 2:
        return []
    return sorted((np.asarray(c) for c in find_contours(field, level)), key=length, reverse=True)


def ring_line(region: Mask, rng: np.random.Generator) -> Curve:
    """A closed line about half-way between the outer edge of a ring and its hole."""
    filled = ndimage.binary_fill_holes(region)
    outer = ndimage.distance_transform_edt(np.pad(filled, 1))[1:-1, 1:-1]
    inner = ndimage.distance_transform_edt(np.pad(~(filled & ~region), 1, constant_values=True))[1:-1, 1:-1]
    across = outer / np.maximum(outer + inner, 1e-9)  # 0 at the outer edge, 1 at the hole
    across = across + 0.08 * wobble(region.shape, 12.0, rng) * region
    curves = level_set(np.pad(across, 1), rng.uniform(0.42, 0.58))
    return curves[0] - 1 if curves else centre_line(region, rng)


def loop_line(region: Mask, share: float, rng: np.random.Generator) -> Curve:
    """A closed line inside a blob at `share` (0 to 1) of its greatest depth, unevenly round."""
    inside = depth(region)
    deepest = float(inside.max())
    bumpy = inside + 0.17 * deepest * wobble(region.shape, max(6.0, 2 * deepest), rng) * (inside > 0)
    curves = level_set(np.pad(bumpy, 1), share * deepest)
    return curves[0] - 1 if curves else centre_line(region, rng)


def centre_line(region: Mask, rng: np.random.Generator) -> Curve:
    """The longest path along the skeleton, smoothed and wobbled; one point for the smallest regions."""
    points = np.argwhere(skeletonize(region))
    if len(points) < 2:
        return np.asarray(points, float)
    path = points[_longest_path(points)].astype(float)
    if len(path) < 5:
        return np.asarray(path)
    smooth = ndimage.gaussian_filter1d(path, 2.0, axis=0, mode="nearest")
    swing = 0.25 * float(depth(region)[tuple(path.astype(int).T)].mean())
    swing_rows, swing_columns = wobble((2, len(path)), 18.0, rng) * swing
    return np.asarray(smooth + np.stack([swing_rows, swing_columns], axis=1))


def zigzag(region: Mask, rng: np.random.Generator) -> Curve:
    """A zigzag line across a blob along its long axis, about a third of its depth from the edge."""
    inside = depth(region)
    points = np.argwhere(inside > 0.3 * inside.max()).astype(float)
    centre = points.mean(axis=0)
    axes = np.linalg.svd(points - centre, full_matrices=False)[2]
    along, across = ((points - centre) @ axes.T).T
    turns = int(rng.integers(4, 9))
    stops = np.quantile(along, np.linspace(0.04, 0.96, turns))
    half = float(np.abs(along).max()) / turns + 1.0
    corners = []
    for index, stop in enumerate(stops):
        distance = np.abs(along - stop)
        near = across[distance <= max(half, float(distance.min()))]  # the region may have a gap at this place
        edge = near.max() if index % 2 else near.min()
        corners.append((stop, edge * rng.uniform(0.7, 1.0)))
    curve = centre + resample(np.asarray(corners), 1.0) @ axes
    return np.asarray(ndimage.gaussian_filter1d(curve, 1.2, axis=0, mode="nearest"))


def length(curve: Curve) -> float:
    """Arc length in pixels."""
    return float(np.hypot(*np.diff(curve, axis=0).T).sum()) if len(curve) > 1 else 0.0


def resample(curve: Curve, step: float) -> Curve:
    """The same curve by points `step` pixels apart."""
    if len(curve) < 2:
        return curve
    travelled = np.concatenate([[0.0], np.hypot(*np.diff(curve, axis=0).T).cumsum()])
    at = np.linspace(0.0, travelled[-1], max(2, int(np.ceil(travelled[-1] / step)) + 1))
    return np.stack([np.interp(at, travelled, curve[:, i]) for i in (0, 1)], axis=1)


def part(curve: Curve, share: float, rng: np.random.Generator) -> Curve:
    """A random connected piece of `share` of the length."""
    if share >= 1.0 or len(curve) < 2:
        return curve
    fine = resample(curve, 0.5)
    keep = max(2, round(share * len(fine)))
    if len(curve) > 2 and np.allclose(curve[0], curve[-1]):
        return np.roll(fine[:-1], -int(rng.integers(len(fine) - 1)), axis=0)[:keep]
    start = int(rng.integers(len(fine) - keep + 1))
    return fine[start : start + keep]


def dashes(curve: Curve, count: int, share: float, rng: np.random.Generator) -> list[Curve]:
    """`count` pieces with gaps between them that together keep about `share` of the curve."""
    fine = resample(part(curve, 0.999, rng), 0.5)
    pieces = [p for p in np.array_split(fine, count) if len(p) > 2]
    return [part(p, share * rng.uniform(0.85, 1.15), rng) for p in pieces]


def pixels(curve: Curve) -> Pixels:
    """The pixels under a curve, (n, 2): 8-connected and one pixel wide, corners cut."""
    points = np.rint(resample(curve, 0.4)).astype(np.int64)
    points = points[np.concatenate([[True], (np.diff(points, axis=0) != 0).any(axis=1)])]
    if len(points) < 3:
        return np.asarray(points)
    corner = np.zeros(len(points), bool)
    corner[1:-1] = np.abs(points[2:] - points[:-2]).max(axis=1) <= 1
    order = np.arange(len(points))
    in_run = order - np.maximum.accumulate(np.where(corner, 0, order))  # of corners in a row, every other one goes
    return np.asarray(points[~corner | (in_run % 2 == 0)])


def paint(canvas: Mask, curve: Curve, width: int) -> None:
    """Draw a curve into `canvas` with a round brush `width` pixels across; what leaves the picture is cut."""
    if not len(curve):
        return
    rows, columns = pixels(curve).T
    reach = np.arange(width) - (width - 1) / 2
    brush = np.argwhere(np.hypot(reach[:, None], reach[None, :]) <= width / 2) - (width - 1) // 2
    rows, columns = (rows[:, None] + brush[:, 0]).ravel(), (columns[:, None] + brush[:, 1]).ravel()
    within = (rows >= 0) & (columns >= 0) & (rows < canvas.shape[0]) & (columns < canvas.shape[1])
    canvas[rows[within], columns[within]] = True


def _longest_path(points: Pixels) -> Any:
    """Indices of the points along the longest shortest path of their 8-neighbour graph (two sweeps)."""
    index = {(int(r), int(c)): i for i, (r, c) in enumerate(points)}
    edges = [
        (i, j, float(np.hypot(dr, dc)))
        for (r, c), i in index.items()
        for dr, dc in ((0, 1), (1, -1), (1, 0), (1, 1))
        if (j := index.get((r + dr, c + dc))) is not None
    ]
    if not edges:
        return np.array([0])
    tails, heads, weights = zip(*edges, strict=True)
    graph = sparse.csr_matrix((weights, (tails, heads)), shape=(len(points), len(points)))
    start = 0
    for _ in range(2):
        distance, before = csgraph.dijkstra(graph, directed=False, indices=np.array(start), return_predecessors=True)
        first, start = start, int(np.argmax(np.where(np.isfinite(distance), distance, -1.0)))
    path = [start]
    while path[-1] != first:
        path.append(int(before[path[-1]]))
    return np.array(path)
