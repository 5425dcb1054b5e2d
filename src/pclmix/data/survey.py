"""Survey of a dataset for planning: sizes, spacing, intensities, strokes and habits, read from its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pclmix.data.dataset import Dataset
from pclmix.data.habits import HabitReport, Tally
from pclmix.data.preprocess import Preprocessing, kept_pixels
from pclmix.errors import PclmixError
from pclmix.io.threads import in_threads
from pclmix.labels import IntArray

#: Number of cases read, evenly spread: more do not change the medians.
CASES = 100
_SLICES = 8  #: slices per case whose strokes are measured
_SAMPLE = 4096  #: intensities under strokes kept per case
#: Air is -1000 in Hounsfield units, and bone above 300; no other modality has both.
_AIR, _BONE = -500, 300


@dataclass(frozen=True)
class CaseFacts:
    """One case."""

    shape: tuple[int, int, int]  #: Z, H, W
    spacing: tuple[float, float, float]
    unit: str
    colour: bool
    low: tuple[float, ...]  #: lowest intensity by channel
    high: tuple[float, ...]
    dim: float  #: share of slices that span less than half of their volume's range
    drawn: npt.NDArray[np.int64]  #: (K,) labelled pixels
    extents: tuple[tuple[float, ...], ...]  #: by class, the longer sides of strokes in pixels
    under: npt.NDArray[np.float32]  #: intensities of the first channel under strokes of structures
    habits: Tally


@dataclass(frozen=True)
class Survey:
    """Facts of a dataset, or of some of its cases."""

    dataset: Dataset
    total: int  #: cases in total
    cases: tuple[str, ...]  #: cases read
    facts: tuple[CaseFacts, ...]
    habits: tuple[HabitReport, ...]  #: stated ones, and others that the data support

    @property
    def shape(self) -> tuple[int, int, int]:
        """Median Z, H, W."""
        z, h, w = (int(n) for n in np.median([fact.shape for fact in self.facts], axis=0))
        return z, h, w

    @property
    def smallest(self) -> tuple[int, int]:
        h, w = np.min([fact.shape[1:] for fact in self.facts], axis=0)
        return int(h), int(w)

    @property
    def largest(self) -> tuple[int, int]:
        h, w = np.max([fact.shape[1:] for fact in self.facts], axis=0)
        return int(h), int(w)

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Median spacing along Z, H, W."""
        z, h, w = (float(n) for n in np.median([fact.spacing for fact in self.facts], axis=0))
        return z, h, w

    @property
    def unit(self) -> str:
        return self.facts[0].unit

    @property
    def pictures(self) -> bool:
        return all(fact.shape[0] == 1 for fact in self.facts)

    @property
    def colour(self) -> bool:
        return all(fact.colour for fact in self.facts)

    @property
    def low(self) -> tuple[float, ...]:
        """Lowest intensity of any case, by channel."""
        return tuple(float(n) for n in np.min([fact.low for fact in self.facts], axis=0))

    @property
    def high(self) -> tuple[float, ...]:
        return tuple(float(n) for n in np.max([fact.high for fact in self.facts], axis=0))

    @property
    def dim(self) -> float:
        """Share of slices that span less than half of their volume's intensities."""
        return float(np.mean([fact.dim for fact in self.facts]))

    @property
    def hounsfield(self) -> bool:
        """Whether intensities are those of CT: one channel with air and bone in most cases."""
        low, high = (np.array([getattr(fact, end)[0] for fact in self.facts]) for end in ("low", "high"))
        seen = (low <= _AIR) & (low >= -4096) & (high >= _BONE)
        return len(self.dataset.channels) == 1 and bool(seen.mean() > 0.8)

    @property
    def under_strokes(self) -> tuple[float, float] | None:
        """Percentiles 0.5 and 99.5 of the intensities under foreground strokes; None without any."""
        values = np.concatenate([fact.under for fact in self.facts])
        if not len(values):
            return None
        low, high = np.percentile(values, (0.5, 99.5))
        return float(low), float(high)

    @property
    def drawn(self) -> npt.NDArray[np.int64]:
        """Labelled pixels by class."""
        return np.asarray(np.sum([fact.drawn for fact in self.facts], axis=0))

    @property
    def cases_drawn(self) -> npt.NDArray[np.int64]:
        """Cases with a stroke, by class."""
        return np.asarray(np.sum([fact.drawn > 0 for fact in self.facts], axis=0))

    def extent(self, k: int) -> float | None:
        """Median longer side of the strokes of class `k`, in pixels; None where there are none."""
        sides = [side for fact in self.facts for side in fact.extents[k]]
        return float(np.median(sides)) if sides else None


def survey(dataset: Dataset, cases: Sequence[str] | None = None, *, show: bool = False) -> Survey:
    """Read up to CASES of `cases` (default: all)."""
    given = tuple(dataset.cases if cases is None else cases)
    if not given:
        raise PclmixError(f"{dataset.root}: there is no case to plan from; `pclmix check` lists what is missing")
    chosen = tuple(given[i] for i in np.unique(np.linspace(0, len(given) - 1, CASES).round().astype(int)))
    facts = tuple(in_threads(lambda case: _look(dataset, case), chosen, "looking at the data", show=show))
    tally = Tally()
    for fact in facts:
        tally.merge(fact.habits)
    return Survey(dataset, len(given), chosen, facts, tally.report(dataset.labels, dataset.habits))


def strokes_kept(dataset: Dataset, cases: Sequence[str], look: Preprocessing) -> tuple[float, list[tuple[str, str]]]:
    """The share of drawn pixels preserved at working size, and the lost ones: (class, case)."""
    count, names = dataset.labels.count, dataset.labels.names

    def one(case: str) -> tuple[int, int, list[tuple[str, str]]]:
        label, _ = dataset.read_scribble(case)
        reduced = look.reduced(label)
        drawn = np.bincount(label[label >= 0], minlength=count)
        shown = np.bincount(reduced[reduced >= 0], minlength=count)
        gone = [(names[k], case) for k in range(count) if drawn[k] and not shown[k]]
        return int(drawn.sum()), int(kept_pixels(label, reduced, count).sum()), gone

    found = in_threads(one, cases, "strokes")
    drawn, kept = sum(row[0] for row in found), sum(row[1] for row in found)
    return kept / max(1, drawn), [pair for row in found for pair in row[2]]


def _look(dataset: Dataset, case: str) -> CaseFacts:
    volume = dataset.read_image(case)
    label, geometry = dataset.read_scribble(case)
    difference = volume.geometry.same_grid(geometry)
    if difference:
        raise PclmixError(f"{dataset.scribble_path(case)} and its image: {difference}")
    array = volume.array
    low, high = array.min(axis=(2, 3)).astype(np.float64), array.max(axis=(2, 3)).astype(np.float64)
    span = high.max(axis=1) - low.min(axis=1)
    drawn_slices = np.flatnonzero((label >= 0).any(axis=(1, 2)))
    under = array[0][label > 0]
    tally = Tally()
    stated = [(dataset.labels.names.index(name), word) for name, words in dataset.habits.items() for word in words]
    if dataset.annotated(case).all():
        tally.add_case(label, None, dataset.labels.count, stated)
    return CaseFacts(
        shape=volume.geometry.shape,
        spacing=volume.geometry.spacing,
        unit=volume.geometry.unit,
        colour=volume.is_colour,
        low=tuple(low.min(axis=1).tolist()),
        high=tuple(high.max(axis=1).tolist()),
        dim=float(((high - low) < 0.5 * span[:, None]).mean()),
        drawn=np.bincount(label[label >= 0], minlength=dataset.labels.count).astype(np.int64),
        extents=_extents(label, drawn_slices, dataset.labels.count),
        under=under[:: -(-max(1, len(under)) // _SAMPLE)].astype(np.float32),
        habits=tally,
    )


def _extents(label: IntArray, slices: npt.NDArray[Any], count: int) -> tuple[tuple[float, ...], ...]:
    """Longer sides of the connected strokes in a few slices, by class."""
    from scipy import ndimage

    sides: list[list[float]] = [[] for _ in range(count)]
    chosen = slices[np.unique(np.linspace(0, len(slices) - 1, _SLICES).round().astype(int))] if len(slices) else []
    for z in chosen:
        for k in range(count):
            strokes, _ = ndimage.label(label[z] == k, np.ones((3, 3)))
            boxes = ndimage.find_objects(strokes)
            sides[k] += [float(max(box[0].stop - box[0].start, box[1].stop - box[1].start)) for box in boxes]
    return tuple(tuple(row) for row in sides)
