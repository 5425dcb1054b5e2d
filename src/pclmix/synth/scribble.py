"""Simulate weak labels from dense masks: scribbles, points, or boxes as background strokes.

Modelled on the expert scribbles of ACDC: one loop through the myocardium, a curl, loop or zigzag inside each blood
pool, one large ring around the heart and a stray arc for the background, one pixel wide, and nothing beyond the ring.
Nothing is specific to hearts: the shape of a region determines its strokes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from pclmix.errors import PclmixError, nearest
from pclmix.labels import IGNORE, IntArray
from pclmix.synth import strokes
from pclmix.synth.strokes import Curve, Mask

KINDS = ("scribble", "brush", "points", "box")
#: Brush width relative to the shorter side of the image: 4 of 256 pixels give strokes of 4.7, as in MedScribble.
_BRUSH = 1 / 64
#: Largest share of the background that brush strokes of the default width cover; people's, in MedScribble, 3 to 7 %.
_BACKGROUND = 0.055
#: A hole smaller than this share of a region does not make it a ring.
_HOLE = 0.04
#: Ratio of area to the area of the largest inscribed disc above which a region is long rather than round.
_LONG = 3.0


@dataclass(frozen=True)
class Style:
    """How much is drawn, and how.

    `amount` 1 is that of the ACDC experts (`scribble`) or, with broader strokes and more pieces, of MedScribble
    (`brush`). Strokes are 1 to `width` pixels wide, at random; with `width` 1 a brush has its default width.
    `border` is the share of each region's outline that is drawn too, just inside it.
    """

    kind: str = "scribble"
    amount: float = 1.0
    width: int = 1
    border: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PclmixError(f"unknown kind '{self.kind}'.{nearest(self.kind, KINDS)} Known: {', '.join(KINDS)}")
        if not 0 < self.amount <= 20:
            raise PclmixError(f"amount is {self.amount}; it must be above 0 and at most 20 (1 is what experts drew)")
        if not 1 <= self.width <= 15:
            raise PclmixError(f"width is {self.width}; it must be 1 to 15 pixels")
        if not 0 <= self.border <= 1:
            raise PclmixError(f"border is {self.border}; it must be a share from 0 to 1")


def case_rng(seed: int, case: str) -> np.random.Generator:
    """The generator of one case, independent of other cases and their order."""
    return np.random.default_rng([seed, zlib.crc32(case.encode())])


def simulate(masks: npt.NDArray[np.integer], style: Style, rng: np.random.Generator) -> IntArray:
    """Weak labels (Z, H, W) for dense masks (Z, H, W): classes where something is drawn, IGNORE elsewhere.

    Each slice and each class in it is drawn on its own, background (0) included. A class in a slice gets at least
    one pixel, and no pixel is ever given another class than its own. IGNORE in the masks is left alone.
    """
    if style.kind == "brush" and style.width == 1:
        style = replace(style, width=min(15, max(1, round(_BRUSH * min(masks.shape[1:])))))
    out = np.full(masks.shape, IGNORE, np.int16)
    for mask, drawn in zip(masks, out, strict=True):
        for k in np.unique(mask[mask > 0]):
            canvas = _foreground(mask == k, style, rng)
            _put(drawn, mask == k, _with_border(canvas, mask == k, style, rng), int(k))
        background = mask == 0
        if background.any():
            canvas = _background(mask > 0, background, style, rng)
            _put(drawn, background, _with_border(canvas, background, style, rng), 0)
    return out


def _with_border(canvas: Mask, region: Mask, style: Style, rng: np.random.Generator) -> Mask:
    """`canvas` with lines along the region's outline, one to three pixels inside; the picture's edge is no outline."""
    if style.border > 0 and not region.all():
        inside = ndimage.distance_transform_edt(region)
        for curve in strokes.level_set(np.minimum(inside, 8.0), float(rng.uniform(1.2, 2.8))):
            pieces = strokes.dashes(curve, int(rng.integers(1, 4)), style.border, rng)
            for piece in pieces or [strokes.part(curve, style.border, rng)]:
                strokes.paint(canvas, piece, _width(style, rng))
    return canvas


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
            continue  # too small to draw into
        piece = parts[box] == index
        target = canvas[box]
        if style.kind == "points":
            _dots(target, piece, max(1, round(style.amount)), style, rng)
        else:
            more = _region_strokes(_core(piece, style) if style.kind == "brush" else piece, rng)
            _draw(target, piece, _in_pieces(more, rng) if style.kind == "brush" else more, style, rng)
    return canvas


def _region_strokes(piece: Mask, rng: np.random.Generator) -> Iterator[list[Curve]]:
    """An endless series of strokes for one connected region; the first is the main stroke.

    Rings get a closed line, long regions a centre-line or a long loop, round ones a curl, a loop or a zigzag.
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


def _core(region: Mask, style: Style) -> Mask:
    """The pixels for the centre of a brush: half its width from the border, unless the region is thinner."""
    inside = strokes.depth(region)
    reach = style.width / 2
    return inside > reach if inside.max() > 2 * reach else region


def _in_pieces(more: Iterator[list[Curve]], rng: np.random.Generator) -> Iterator[list[Curve]]:
    """The same strokes, half of them interrupted once or twice; every second time another one is added."""
    for first in more:
        curves = first + next(more) if rng.random() < 0.5 else first
        cut = [strokes.dashes(c, int(rng.integers(2, 4)), 0.85, rng) if rng.random() < 0.5 else [c] for c in curves]
        yield [piece for pieces in cut for piece in pieces]


def _background(foreground: Mask, background: Mask, style: Style, rng: np.random.Generator) -> Mask:
    canvas = np.zeros_like(background)
    if style.kind == "points":
        _dots(canvas, _surroundings(foreground, background), max(1, round(5 * style.amount)), style, rng)
    elif style.kind == "box" and foreground.any():
        _draw(canvas, background, _boxes(foreground, rng), style, rng)
    elif foreground.any() and style.kind == "brush":
        _draw(canvas, background, _arcs(foreground, rng), style, rng)
    elif foreground.any():
        _draw(canvas, background, _rings(foreground, rng), style, rng)
    else:
        _draw(canvas, background, _sweeps(background.shape, rng), style, rng)
    return canvas


def _rings(foreground: Mask, rng: np.random.Generator) -> Iterator[list[Curve]]:
    """One large ring around everything and a short arc; then an endless series of wider or narrower arcs."""
    away = ndimage.distance_transform_edt(~foreground)
    away = ndimage.gaussian_filter(away, 3.0)
    size = float(np.sqrt(foreground.sum()))

    def ring(distance: float) -> list[Curve]:
        bumpy = away + 0.15 * distance * strokes.wobble(foreground.shape, max(20.0, size), rng)
        # Several if the image border cuts the ring, or if structures are far apart.
        return [c for c in strokes.level_set(bumpy, distance) if strokes.length(c) > 12]

    near = 4.0 + rng.uniform(0.10, 0.35) * size
    stray = [strokes.part(c, rng.uniform(0.1, 0.35), rng) for c in ring(near + rng.uniform(0.1, 0.4) * size)[:1]]
    yield [strokes.part(c, rng.uniform(0.85, 1.1), rng) for c in ring(near)] + stray
    while True:
        yield [strokes.part(c, rng.uniform(0.3, 0.8), rng) for c in ring(near + rng.uniform(-0.1, 0.8) * size)]


def _arcs(foreground: Mask, rng: np.random.Generator) -> Iterator[list[Curve]]:
    """As `_rings`, but in pieces and, in two of three cases, close to the object only.

    Around many small structures the outlines are long: people then draw along a part of them.
    """
    away = ndimage.gaussian_filter(ndimage.distance_transform_edt(~foreground), 2.0)
    size = float(np.sqrt(foreground.sum()))
    far = bool(rng.random() < 1 / 3)

    def arcs(distance: float, share: float) -> list[Curve]:
        bumpy = away + 0.2 * distance * strokes.wobble(foreground.shape, max(20.0, size), rng)
        rings = [c for c in strokes.level_set(bumpy, distance) if strokes.length(c) > 12]
        return [piece for c in rings for piece in strokes.dashes(c, int(rng.integers(1, 4)), share, rng)]

    while True:
        curves = arcs(3.0 + rng.uniform(0.06, 0.2) * size, rng.uniform(0.8, 1.0))
        if far:
            for distance in rng.uniform(0.06, 0.3, int(rng.integers(1, 4))):
                curves += arcs(float(distance) * min(foreground.shape), rng.uniform(0.6, 0.9))
        left = _BACKGROUND * float((~foreground).sum()) / (_BRUSH * min(foreground.shape))
        kept = []
        for curve in curves:
            if left < 12:
                break
            kept.append(strokes.part(curve, left / max(1.0, strokes.length(curve)), rng))
            left -= strokes.length(curve)
        yield kept


def _boxes(foreground: Mask, rng: np.random.Generator) -> Iterator[list[Curve]]:
    """The outline of the bounding box, one pixel outside it; then boxes further out."""
    rows, columns = np.nonzero(foreground)
    margin = 1
    while True:
        top, bottom = rows.min() - margin, rows.max() + margin
        left, right = columns.min() - margin, columns.max() + margin
        corners = [(top, left), (top, right), (bottom, right), (bottom, left), (top, left)]
        yield [np.asarray(corners, float)]
        margin += int(rng.integers(2, 6))


def _sweeps(shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[list[Curve]]:
    """For slices of background only: long wavy lines across the middle, or a large loop."""
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
    for _ in range(int(np.ceil(4 * style.amount))):  # the region is full
        if left <= 1.0:
            break
        curves = next(more)
        total = max(1.0, sum(map(strokes.length, curves)))
        _paint(canvas, region, [strokes.part(c, left / total, rng) for c in curves], style, rng)
        left -= total


def _paint(canvas: Mask, region: Mask, curves: list[Curve], style: Style, rng: np.random.Generator) -> None:
    for curve in curves:
        strokes.paint(canvas, curve, _width(style, rng))
    canvas &= region


def _width(style: Style, rng: np.random.Generator) -> int:
    """Pixels across one stroke; a brush is always as broad."""
    return style.width if style.kind == "brush" else int(rng.integers(1, style.width + 1))


def _dots(canvas: Mask, region: Mask, count: int, style: Style, rng: np.random.Generator) -> None:
    """`count` random points, more likely in the interior of the region than at its edge."""
    inside = strokes.depth(region)
    candidates = np.argwhere(inside >= 0.5 * inside.max()) if inside.max() > 1 else np.argwhere(region)
    for point in candidates[rng.choice(len(candidates), min(count, len(candidates)), replace=False)]:
        strokes.paint(canvas, point[None].astype(float), int(rng.integers(1, style.width + 1)))


def _surroundings(foreground: Mask, background: Mask) -> Mask:
    """Weights of background points: around the foreground, not in the far corners."""
    if not foreground.any():
        return background
    reach = 6.0 + 0.7 * float(np.sqrt(foreground.sum()))
    away = ndimage.distance_transform_edt(~foreground)
    band = background & (away <= reach) & (away > 2)
    return band if band.any() else background
