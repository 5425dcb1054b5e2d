"""Weak labels from dense masks, drawn as people draw them: scribbles, points, or a box as background strokes.

Modelled on the expert scribbles of ACDC: one loop through the myocardium, a curl, loop or zigzag inside each blood
pool, one large ring around the heart and a stray arc for the background, one pixel wide, and nothing beyond the ring.
Nothing here knows about hearts: the shape of a region decides how it is drawn.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from pclmix.data import strokes
from pclmix.data.strokes import Curve, Mask
from pclmix.errors import PclmixError, nearest
from pclmix.labels import IGNORE, IntArray

KINDS = ("scribble", "points", "box")
#: A hole smaller than this share of a region does not make it a ring.
_HOLE = 0.04
#: Area over the area of the largest disc inside: above it a region is long rather than round.
_LONG = 3.0


@dataclass(frozen=True)
class Style:
    """How much is drawn. `amount` 1 is what the ACDC experts drew; strokes are 1 to `width` pixels wide, at random."""

    kind: str = "scribble"
    amount: float = 1.0
    width: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PclmixError(f"unknown kind '{self.kind}'.{nearest(self.kind, KINDS)} Known: {', '.join(KINDS)}")
        if not 0 < self.amount <= 20:
            raise PclmixError(f"amount is {self.amount}; it must be above 0 and at most 20 (1 is what experts drew)")
        if not 1 <= self.width <= 15:
            raise PclmixError(f"width is {self.width}; it must be 1 to 15 pixels")


def case_rng(seed: int, case: str) -> np.random.Generator:
    """The generator of one case: the same whichever other cases are drawn, and in whatever order."""
    return np.random.default_rng([seed, zlib.crc32(case.encode())])


def simulate(masks: npt.NDArray[np.integer], style: Style, rng: np.random.Generator) -> IntArray:
    """Weak labels (Z, H, W) for dense masks (Z, H, W): classes where something is drawn, IGNORE elsewhere.

    Each slice and each class in it is drawn on its own, background (0) included. A class in a slice gets at least
    one pixel, and no pixel is ever given another class than its own. IGNORE in the masks is left alone.
    """
    out = np.full(masks.shape, IGNORE, np.int16)
    for mask, drawn in zip(masks, out, strict=True):
        for k in np.unique(mask[mask > 0]):
            _put(drawn, mask == k, _foreground(mask == k, style, rng), int(k))
        background = mask == 0
        if background.any():
            _put(drawn, background, _background(mask > 0, background, style, rng), 0)
    return out


def _put(drawn: IntArray, region: Mask, canvas: Mask, k: int) -> None:
    canvas = canvas & region
    if not canvas.any():  # a region too small for a line: its deepest pixel
        canvas[np.unravel_index(int(np.argmax(strokes.depth(region))), region.shape)] = True
    drawn[canvas] = k


def _foreground(region: Mask, style: Style, rng: np.random.Generator) -> Mask:
    canvas = np.zeros_like(region)
    parts, _ = ndimage.label(region, np.ones((3, 3)))
    boxes = ndimage.find_objects(parts)
    sizes = np.bincount(parts.ravel())[1:]
    for index, box in enumerate(boxes, start=1):
        if sizes[index - 1] < 0.02 * sizes.max():
            continue  # crumbs: nobody draws into them
        piece = parts[box] == index
        target = canvas[box]
        if style.kind == "points":
            _dots(target, piece, max(1, round(style.amount)), style, rng)
        else:
            _draw(target, piece, _region_strokes(piece, rng), style, rng)
    return canvas


def _region_strokes(piece: Mask, rng: np.random.Generator) -> Iterator[list[Curve]]:
    """Strokes for one connected region, without end: the first is what a person would draw, the rest are more of it.

    Rings are walked around, long regions along their centre-line or in a long loop, round ones get a curl, a loop
    or a zigzag.
    """
    area = int(piece.sum())
    inside = strokes.depth(piece)
    holes = int(ndimage.binary_fill_holes(piece).sum()) - area
    is_ring = holes > max(4, _HOLE * area)
    is_long = area > _LONG * np.pi * float(inside.max()) ** 2
    while True:
        draw = float(rng.random())
        if is_ring:
            line = strokes.ring_line(piece, rng)
            if draw < 0.35:
                yield strokes.dashes(line, int(rng.integers(2, 5)), rng.uniform(0.65, 0.9), rng)
            else:
                yield [strokes.part(line, rng.uniform(0.85, 1.1), rng)]
        elif area < 12:
            yield [strokes.centre_line(piece, rng)]
        elif is_long:
            if draw < 0.5:
                yield [strokes.part(strokes.centre_line(piece, rng), rng.uniform(0.7, 1.0), rng)]
            else:
                yield [strokes.part(strokes.loop_line(piece, rng.uniform(0.25, 0.5), rng), rng.uniform(0.7, 1.1), rng)]
        elif draw < 0.3:
            yield [strokes.zigzag(piece, rng)]
        else:
            yield [strokes.part(strokes.loop_line(piece, rng.uniform(0.2, 0.45), rng), rng.uniform(0.7, 1.2), rng)]


def _background(foreground: Mask, background: Mask, style: Style, rng: np.random.Generator) -> Mask:
    canvas = np.zeros_like(background)
    if style.kind == "points":
        _dots(canvas, _surroundings(foreground, background), max(1, round(5 * style.amount)), style, rng)
    elif style.kind == "box" and foreground.any():
        _draw(canvas, background, _boxes(foreground, rng), style, rng)
    elif foreground.any():
        _draw(canvas, background, _rings(foreground, rng), style, rng)
    else:
        _draw(canvas, background, _sweeps(background.shape, rng), style, rng)
    return canvas


def _rings(foreground: Mask, rng: np.random.Generator) -> Iterator[list[Curve]]:
    """One large ring around everything and a stray arc; then wider or narrower arcs without end."""
    away = ndimage.distance_transform_edt(~foreground)
    away = ndimage.gaussian_filter(away, 3.0)
    size = float(np.sqrt(foreground.sum()))

    def ring(distance: float) -> list[Curve]:
        bumpy = away + 0.15 * distance * strokes.wobble(foreground.shape, max(20.0, size), rng)
        # Several where the picture's edge cuts the ring, or where there are things far apart.
        return [c for c in strokes.level_set(bumpy, distance) if strokes.length(c) > 12]

    near = 4.0 + rng.uniform(0.10, 0.35) * size
    stray = [strokes.part(c, rng.uniform(0.1, 0.35), rng) for c in ring(near + rng.uniform(0.1, 0.4) * size)[:1]]
    yield [strokes.part(c, rng.uniform(0.85, 1.1), rng) for c in ring(near)] + stray
    while True:
        yield [strokes.part(c, rng.uniform(0.3, 0.8), rng) for c in ring(near + rng.uniform(-0.1, 0.8) * size)]


def _boxes(foreground: Mask, rng: np.random.Generator) -> Iterator[list[Curve]]:
    """The outline of the bounding box, one pixel outside it; more of it are boxes further out."""
    rows, columns = np.nonzero(foreground)
    margin = 1
    while True:
        top, bottom = rows.min() - margin, rows.max() + margin
        left, right = columns.min() - margin, columns.max() + margin
        corners = [(top, left), (top, right), (bottom, right), (bottom, left), (top, left)]
        yield [np.asarray(corners, float)]
        margin += int(rng.integers(2, 6))


def _sweeps(shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[list[Curve]]:
    """A slice of background alone: long wavering lines across its middle, or a large loop."""
    h, w = shape
    while True:
        curves: list[Curve] = []
        for _ in range(2):
            turn, at = rng.uniform(0, np.pi), np.linspace(-1.0, 1.0, 40)
            reach = 0.28 * min(h, w) * rng.uniform(0.7, 1.2)
            swing = 0.25 * reach * strokes.wobble((1, 40), 25.0, rng)[0]
            offset = rng.normal(0.0, 0.08 * min(h, w), 2)
            row = h / 2 + offset[0] + at * reach * np.sin(turn) + swing * np.cos(turn)
            column = w / 2 + offset[1] + at * reach * np.cos(turn) - swing * np.sin(turn)
            curves.append(np.stack([row, column], axis=1))
        yield curves


def _draw(canvas: Mask, region: Mask, more: Iterator[list[Curve]], style: Style, rng: np.random.Generator) -> None:
    """Draw the first strokes; less of them, or further ones, until `amount` times their length is on the canvas."""
    first = next(more)
    wanted = style.amount * sum(map(strokes.length, first))
    _paint(canvas, region, [strokes.part(c, style.amount, rng) for c in first], style, rng)
    left = wanted - sum(map(strokes.length, first))
    for _ in range(int(np.ceil(4 * style.amount))):  # a region that is full gives nothing more
        if left <= 1.0:
            break
        curves = next(more)
        total = max(1.0, sum(map(strokes.length, curves)))
        _paint(canvas, region, [strokes.part(c, left / total, rng) for c in curves], style, rng)
        left -= total


def _paint(canvas: Mask, region: Mask, curves: list[Curve], style: Style, rng: np.random.Generator) -> None:
    for curve in curves:
        strokes.paint(canvas, curve, int(rng.integers(1, style.width + 1)))
    canvas &= region


def _dots(canvas: Mask, region: Mask, count: int, style: Style, rng: np.random.Generator) -> None:
    """`count` points at random, likelier in the depth of the region than at its edge."""
    inside = strokes.depth(region)
    candidates = np.argwhere(inside >= 0.5 * inside.max()) if inside.max() > 1 else np.argwhere(region)
    for point in candidates[rng.choice(len(candidates), min(count, len(candidates)), replace=False)]:
        strokes.paint(canvas, point[None].astype(float), int(rng.integers(1, style.width + 1)))


def _surroundings(foreground: Mask, background: Mask) -> Mask:
    """Where people put background points: around the foreground, not in the far corners."""
    if not foreground.any():
        return background
    reach = 6.0 + 0.7 * float(np.sqrt(foreground.sum()))
    away = ndimage.distance_transform_edt(~foreground)
    band = background & (away <= reach) & (away > 2)
    return band if band.any() else background
