"""Stroke habits: keywords per class that describe how strokes were drawn, and tests of them.

dataset.json has `"habits": {"background": "ring", "LV": "convex", "Myo": "midline"}`; several words of one class are a
list. A habit is knowledge about one dataset that the strokes alone do not show. It is therefore stated with the data,
and `pclmix check` tests it.

All functions work on one slice (H, W): strokes with IGNORE and, if available, the dense mask.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pclmix.errors import PclmixError, nearest
from pclmix.labels import Labels

#: The keywords and their meaning.
HABITS = {
    "ring": "its strokes surround everything else: pixels outside the convex hull of a slice's strokes are this class",
    "convex": "it is one convex component in every slice",
    "midline": "it is a wall around an inner class, and its stroke follows the middle of the wall",
    "pieces": "every component of it in a slice has a stroke",
}
NONE = "none"  #: on the command line: no habit of this class
#: Class name to habits, without classes that have none.
Habits = Mapping[str, tuple[str, ...]]

Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

HOLDS = 0.9  #: share of slices above which a stated habit gives no warning
SUGGESTED = 0.97  #: share of slices above which a habit is suggested,
FEWEST = 8  #: if at least this many slices were tested
SLICES, CASES = 8, 100  #: slices per case and cases per dataset that are tested, evenly spread


class Seen(NamedTuple):
    """In how many slices a habit of a class was tested, and in how many it held."""

    tested: int
    held: int

    @property
    def share(self) -> float:
        return self.held / self.tested if self.tested else float("nan")


@dataclass(frozen=True)
class HabitReport:
    """One habit of one class against the strokes alone and against the dense masks."""

    name: str  #: of the class
    habit: str
    stated: bool
    strokes: Seen
    masks: Seen

    @property
    def best(self) -> Seen:
        """The test on masks if there is one, else that on strokes."""
        return self.masks if self.masks.tested else self.strokes


def parse_habits(table: object, labels: Labels, where: str) -> Habits:
    """Read `habits` of dataset.json or of a configuration; `where` names the key for messages."""
    if not isinstance(table, Mapping):
        raise PclmixError(f'{where}: habits must be a table such as {{"background": "ring", "LV": "convex"}}')
    found: dict[str, tuple[str, ...]] = {}
    for name, words in table.items():
        labels.index(str(name), f"{where}.{name}")
        if isinstance(words, str):
            words = re.split(r"[,\s]+", words.strip())
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
            raise PclmixError(f"{where}.{name}: one habit or a list of them is needed, of {', '.join(HABITS)}")
        for word in words:
            if word not in HABITS and not (word == NONE and len(words) == 1):
                raise PclmixError(
                    f"{where}.{name}: unknown habit '{word}'.{nearest(word, (*HABITS, NONE))} "
                    f"Known: {', '.join(HABITS)}, or {NONE}"
                )
            if name == labels.names[0] and word not in ("ring", NONE):
                raise PclmixError(f"{where}.{name}: '{word}' is a habit of structures; the background can have 'ring'")
        found[str(name)] = tuple(dict.fromkeys(words))
    _require_one_ring(found, where)
    return found


def _require_one_ring(habits: Habits, where: str) -> None:
    rings = [name for name, words in habits.items() if "ring" in words]
    if len(rings) > 1:
        raise PclmixError(f"{where}: only one class can lie outside all strokes, but {', '.join(rings)} have 'ring'")


def override_habits(stated: Habits, given: object, labels: Labels) -> Habits:
    """The dataset's habits; those of the configuration replace them for each class that it names.

    `none` stays in the result, so that the result can be passed in again.
    """
    merged = {**stated, **parse_habits(given, labels, "habits")}
    _require_one_ring(merged, "habits")
    return merged


def classes_with(habit: str, habits: Habits, labels: Labels) -> tuple[int, ...]:
    """The numbers of the classes that have a habit, in order."""
    return tuple(k for k, name in enumerate(labels.names) if habit in habits.get(name, ()))


def hull_mask(points: Mask) -> Mask:
    """The pixels whose centres lie in the convex hull of the true pixels' centres."""
    out = np.zeros(points.shape, bool)
    rows = np.flatnonzero(points.any(axis=1))
    if len(rows):
        part = points[rows]
        first, last = part.argmax(axis=1), points.shape[1] - 1 - part[:, ::-1].argmax(axis=1)
        y, x = np.arange(rows[0], rows[-1] + 1), np.arange(points.shape[1])
        low, high = -_roof(rows, -first, y), _roof(rows, last, y)
        out[y] = (x >= low[:, None] - 1e-6) & (x <= high[:, None] + 1e-6)
    return out


def _roof(rows: Array, ends: Array, at: Array) -> Array:
    """The upper concave envelope of `ends` over the rows."""
    corners: list[tuple[int, int]] = []
    for y, x in zip(rows.tolist(), ends.tolist(), strict=True):
        while len(corners) > 1:
            (y0, x0), (y1, x1) = corners[-2:]
            if (x1 - x0) * (y - y0) > (x - x0) * (y1 - y0):
                break
            corners.pop()
        corners.append((y, x))
    y_corner, x_corner = np.array(corners, float).T
    return np.asarray(np.interp(at, y_corner, x_corner))


def enclosed_class(strokes: Array, k: int, count: int) -> int | None:
    """The foreground class, other than `k`, most of whose strokes lie inside the hull of those of `k`; or None."""
    hull = hull_mask(strokes == k)
    best, most = None, 0.8
    for j in range(1, count):
        own = strokes == j
        if j != k and own.any() and hull[own].mean() > most:
            best, most = j, float(hull[own].mean())
    return best


def habit_holds(habit: str, k: int, strokes: Array, mask: Array | None, count: int) -> bool | None:
    """Whether a habit of class `k` of `count` holds in a slice; None where the slice does not allow a test."""
    if habit == "ring":
        return _ring_holds(k, strokes, mask)
    if k == 0:
        return None  # the other habits describe structures
    if habit == "convex":
        return _convex_holds(k, strokes, mask)
    return _midline_holds(k, strokes, mask, count) if habit == "midline" else _pieces_hold(k, strokes, mask)


def _ring_holds(k: int, strokes: Array, mask: Array | None) -> bool | None:
    """With a mask: at most 1 % of the other classes lies outside the hull of all strokes.

    Else: the hull of the ring holds 98 % of the other strokes, and it lies in 12 of 16 directions from their middle.
    """
    ring = strokes == k
    if not ring.any():
        return None
    if mask is not None:
        objects = (mask >= 0) & (mask != k)
        return None if not objects.any() else bool(_outside(strokes >= 0, objects) <= 0.01 * objects.sum())
    others = (strokes >= 0) & ~ring
    if not others.any():
        return None
    away = np.argwhere(ring) - np.argwhere(others).mean(axis=0)
    directions = np.unique(((np.arctan2(away[:, 0], away[:, 1]) / np.pi + 1) * 8).astype(int) % 16)
    return bool(hull_mask(ring)[others].mean() >= 0.98 and len(directions) >= 12)


def _outside(drawn: Mask, objects: Mask) -> int:
    """The number of object pixels outside the hull of the drawn pixels, dilated by one pixel."""
    hull = np.pad(hull_mask(drawn), 1)
    near = hull[1:-1, 1:-1] | hull[:-2, 1:-1] | hull[2:, 1:-1] | hull[1:-1, :-2] | hull[1:-1, 2:]
    return int(np.count_nonzero(objects & ~near))


def _convex_holds(k: int, strokes: Array, mask: Array | None) -> bool | None:
    """With a mask: the class fills 95 % of its hull. Else: the hull of its strokes has no others in it.

    Strokes alone can only refute it.
    """
    own = (strokes if mask is None else mask) == k
    if not own.any():
        return None
    box = _box(own)
    own, hull = own[box], hull_mask(own[box])
    if mask is not None:
        return None if own.sum() < 20 else bool(own.sum() >= 0.95 * hull.sum())
    if hull.sum() < max(20, 2 * own.sum()):  # a line or a dot encloses nothing
        return None
    return bool((hull & (strokes[box] >= 0) & ~own).sum() <= 0.01 * own.sum())


def _midline_holds(k: int, strokes: Array, mask: Array | None, count: int) -> bool | None:
    """With a mask: the stroke lies between 0.35 and 0.65 of the way through the wall, as a median over the slice.

    Else: a class lies inside the wall's stroke; without one there is no test.
    """
    from scipy import ndimage

    stroke = strokes == k
    inner = enclosed_class(strokes, k, count) if stroke.sum() >= 10 else None
    if inner is None:
        return None
    if mask is None:
        return bool(hull_mask(stroke)[strokes == inner].mean() >= 0.98)
    box = _box((mask == k) | (mask == inner) | stroke)
    wall, inside, stroke = mask[box] == k, mask[box] == inner, stroke[box]
    stroke = stroke & wall
    if stroke.sum() < 10 or not inside.any():
        return None
    before = ndimage.distance_transform_edt(~inside)[stroke]
    behind = ndimage.distance_transform_edt(np.pad(wall | inside, 1))[1:-1, 1:-1][stroke]
    return bool(abs(np.median(before / (before + behind)) - 0.5) <= 0.15)


def _pieces_hold(k: int, strokes: Array, mask: Array | None) -> bool | None:
    """Every component has a stroke, except those below 2 % of the largest. Needs masks."""
    from scipy import ndimage

    if mask is None or not (mask == k).any():
        return None
    box = _box(mask == k)
    parts, count = ndimage.label(mask[box] == k, np.ones((3, 3)))
    sizes = np.bincount(parts.ravel(), minlength=count + 1)[1:]
    drawn = np.bincount(parts[strokes[box] == k], minlength=count + 1)[1:]
    return bool(drawn[sizes >= max(2, 0.02 * sizes.max())].all())


def _box(mask: Mask) -> tuple[slice, slice]:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1)


@dataclass
class Tally:
    """Habits of classes counted over slices: [tested on strokes, held, tested on masks, held]."""

    counts: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    drawn: dict[int, int] = field(default_factory=dict)  #: slices with a stroke, by class

    def add_case(self, strokes: Array, mask: Array | None, count: int, stated: Iterable[tuple[int, str]]) -> None:
        """Look at up to SLICES slices (Z, H, W) that have strokes, evenly spread.

        The ring is tested for the background and where it is stated, other habits for every foreground class.
        """
        asked = {(0, "ring"), *((k, habit) for k in range(1, count) for habit in HABITS if habit != "ring"), *stated}
        slices = np.flatnonzero((strokes >= 0).any(axis=(1, 2)))
        for z in slices[np.unique(np.linspace(0, len(slices) - 1, SLICES).round().astype(int))] if len(slices) else ():
            s, m = strokes[z], mask[z] if mask is not None else None
            box = _box((s >= 0) | (m > 0) if m is not None else s >= 0)
            s, m = s[box], m[box] if m is not None else None
            for k in np.unique(s[s >= 0]).tolist():
                self.drawn[k] = self.drawn.get(k, 0) + 1
            for k, habit in asked:
                row = self.counts.setdefault((k, habit), [0, 0, 0, 0])
                for place, source in ((0, None), (2, m)):
                    if place and m is None:
                        continue
                    holds = habit_holds(habit, k, s, source, count)
                    if holds is not None:
                        row[place] += 1
                        row[place + 1] += holds

    def merge(self, other: Tally) -> None:
        for key, row in other.counts.items():
            self.counts[key] = [a + b for a, b in zip(self.counts.get(key, [0] * 4), row, strict=True)]
        for k, n in other.drawn.items():
            self.drawn[k] = self.drawn.get(k, 0) + n

    def report(self, labels: Labels, stated: Habits) -> tuple[HabitReport, ...]:
        """The stated habits, and those that the data support."""
        found = []
        for (k, habit), row in sorted(self.counts.items()):
            said = habit in stated.get(labels.names[k], ())
            one = HabitReport(labels.names[k], habit, said, Seen(*row[:2]), Seen(*row[2:]))
            if said or self._seems(k, one):
                found.append(one)
        return tuple(found)

    def _seems(self, k: int, one: HabitReport) -> bool:
        """Strokes alone can show a ring. The other habits need masks, since strokes can only refute them."""
        seen = one.best if one.habit == "ring" else one.masks
        enough = seen.tested >= max(FEWEST, self.drawn.get(k, 0) / 2)
        return enough and seen.share >= SUGGESTED
