"""One case of a dataset: its files, each opened once, and what a check finds in them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pclmix.data.dataset import ChannelError, Dataset, read_channels
from pclmix.data.habits import HABITS, HabitReport, Tally, classes_with
from pclmix.data.preprocess import Preprocessing, kept_pixels
from pclmix.errors import PclmixError
from pclmix.io.volume import Geometry, Volume, read_image, read_labels
from pclmix.labels import IntArray

_SHOWN = 3  # errors in a refusal


class Contradiction(NamedTuple):
    """One scribble pixel (slice z, row y, column x) whose class is not the reference's."""

    z: int
    y: int
    x: int
    drawn: str
    reference: str


@dataclass(frozen=True)
class Finding:
    """One problem; `count` and `where` give pixels of strokes that contradict the reference."""

    level: Literal["error", "warning"]
    kind: str
    message: str
    case: str = ""
    file: str = ""
    count: int = 0
    where: tuple[Contradiction, ...] = ()


@dataclass(frozen=True)
class ClassShare:
    """Annotated share of a class: pixels, their share of all pixels, and the number of cases with a stroke.

    `kept` is the share of the pixels that strokes at the working size still show.
    """

    name: str
    pixels: int
    share: float
    cases: int
    kept: float = 1.0


@dataclass(frozen=True)
class Report:
    """What `check` found."""

    dataset: str
    cases: int = 0
    references: int = 0
    classes: tuple[ClassShare, ...] = ()
    findings: tuple[Finding, ...] = ()
    habits: tuple[HabitReport, ...] = ()  #: stated ones, and others that the data support
    size: tuple[int, int] = (0, 0)  #: the working size that `kept` speaks of

    @property
    def suggested_habits(self) -> dict[str, list[str]]:
        """Habits that the data support and dataset.json does not state, in its format."""
        found: dict[str, list[str]] = {}
        for habit in self.habits:
            if not habit.stated:
                found.setdefault(habit.name, []).append(habit.habit)
        return found

    @property
    def errors(self) -> list[Finding]:
        return [f for f in self.findings if f.level == "error"]

    @property
    def warnings(self) -> list[Finding]:
        return [f for f in self.findings if f.level == "warning"]

    def to_json(self) -> dict[str, Any]:
        contradicting = [f for f in self.findings if f.kind == "contradiction"]
        return {
            **asdict(self),
            "ok": not self.errors,
            "errors": len(self.errors),
            "warnings": len(self.warnings),
            "contradictions": {"cases": len(contradicting), "pixels": sum(f.count for f in contradicting)},
            "findings": [{**asdict(f), "where": [place._asdict() for place in f.where]} for f in self.findings],
            "habits": [{**asdict(h), "strokes": h.strokes._asdict(), "masks": h.masks._asdict()} for h in self.habits],
        }

    def refusal(self) -> str:
        """The first few errors as one message."""
        errors = self.errors
        text = "; ".join(f.message for f in errors[:_SHOWN])
        if len(errors) > _SHOWN:
            text += f"; and {len(errors) - _SHOWN} more errors: see `pclmix check {self.dataset}`"
        return text


Source = Literal["scribble", "reference"]


class CaseFiles:
    """Reads each file of a case on first use and keeps the result or the error."""

    def __init__(self, dataset: Dataset, case: str) -> None:
        self.dataset, self.case = dataset, case
        self._bytes: dict[Path, bytes] = {}  # read for the digest, not decoded yet
        self._known: dict[str, Any] = {}

    def label_path(self, source: Source) -> Path:
        find = self.dataset.scribble_path if source == "scribble" else self.dataset.reference_path
        return find(self.case)

    def digest(self, source: Source) -> bytes:
        """A hash of the image files and the labels of `source`; OSError where one cannot be read."""
        total = hashlib.blake2b(digest_size=16)
        for path in (*self.dataset.image_paths(self.case), self.label_path(source)):
            content = self.dataset.kept(path)
            self._bytes[path] = path.read_bytes() if content is None else content
            total.update(hashlib.blake2b(self._bytes[path], digest_size=16).digest())
        return total.digest()

    def image(self) -> Volume:
        """All channels, (C, Z, H, W)."""
        paths, count = self.dataset.image_paths(self.case), len(self.dataset.channels)
        volume: Volume = self._once("image", lambda: read_channels(paths, count, self._read_image))
        return volume

    def labels(self, source: Source) -> tuple[IntArray, Geometry]:
        """Classes and IGNORE, (Z, H, W). The reference is for evaluation and the upper-bound method only."""
        labels: tuple[IntArray, Geometry] = self._once(source, lambda: self._read_labels(self.label_path(source)))
        return labels

    def _read_image(self, path: Path) -> Volume:
        return read_image(path, self._content(path))

    def _read_labels(self, path: Path) -> tuple[IntArray, Geometry]:
        array, geometry = read_labels(path, self._content(path))
        return self.dataset.labels.decode(array, str(path)), geometry

    def _content(self, path: Path) -> bytes | None:
        return self._bytes.pop(path) if path in self._bytes else self.dataset.kept(path)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._known:
            try:
                self._known[name] = make()
            except PclmixError as error:
                self._known[name] = error
        if isinstance(self._known[name], PclmixError):
            raise self._known[name]
        return self._known[name]


EMPTY = "empty"  #: kind of finding: a case without strokes
_WHERE = 50  # positions kept per case


@dataclass
class CaseCheck:
    """What a check found in one case."""

    findings: list[Finding] = field(default_factory=list)
    strokes: npt.NDArray[np.int64] | None = None  # pixels drawn, by class
    kept: npt.NDArray[np.int64] | None = None  # those visible at working size
    pixels: int = 0
    sform: str = ""  # how sform and pixdim disagree
    habits: Tally | None = None  # stroke habits, in the cases tested for them


def check_case(files: CaseFiles, references: bool, habits: bool, look: Preprocessing) -> CaseCheck:
    """Check the files of a case; with `references` also the dense mask, if any."""
    result = CaseCheck(habits=Tally() if habits else None)
    try:
        _check(files, references, result, look)
    except Exception as error:  # damaged files raise many types of errors; the other cases are still checked
        message = f"case '{files.case}' of {files.dataset.root} cannot be checked: {type(error).__name__}: {error}"
        result.findings.append(Finding("error", "unreadable", message, files.case))
    return result


def _check(files: CaseFiles, references: bool, result: CaseCheck, look: Preprocessing) -> None:
    dataset, case = files.dataset, files.case
    image_paths, scribble_path = dataset.image_paths(case), dataset.scribble_path(case)
    grid: Geometry | None = None
    scribble: IntArray | None = None

    def error(kind: str, message: str, path: Path) -> None:
        result.findings.append(Finding("error", kind, message, case, _relative(path, dataset.root)))

    missing = [path for path in image_paths if not path.exists()]
    if missing and missing == image_paths[1:]:
        names = ", ".join(path.name for path in missing[:3])
        error("channels", f"{image_paths[0]} is the only channel found; channel_names also needs {names}", missing[0])
    elif missing:
        error("missing", f"{missing[0]} does not exist, but case '{case}' needs it; add it", missing[0])
    else:
        try:
            grid = files.image().geometry
            result.sform = _sform_disagreement(grid)
        except ChannelError as problem:
            error("channels", str(problem), image_paths[0])
        except PclmixError as problem:
            error("unreadable", str(problem), image_paths[0])

    def labels(source: Source) -> IntArray | None:
        path = files.label_path(source)
        try:
            array, geometry = files.labels(source)
        except PclmixError as problem:
            error("unreadable", str(problem), path)
            return None
        difference = grid.same_grid(geometry) if grid is not None else ""
        if difference:
            message = f"{path} does not fit {image_paths[0]}: {difference}; write it again over the image's grid"
            error("geometry", message, path)
            return None
        return np.asarray(array)

    if not scribble_path.exists():
        message = f"{scribble_path} does not exist, so case '{case}' has no scribble; add it or move the image away"
        error("missing", message, scribble_path)
    else:
        scribble = labels("scribble")
    if scribble is not None:
        _check_strokes(dataset, case, scribble, result, look)
    reference: IntArray | None = None
    if references and dataset.reference_path(case).exists():
        reference = labels("reference")
        if scribble is not None and reference is not None:
            result.findings += _contradictions(dataset, case, scribble, reference)
    # Habits speak of all classes: where some were not annotated, nothing follows from their strokes.
    if scribble is not None and result.habits is not None and dataset.annotated(case).all():
        same = reference is not None and reference.shape == scribble.shape
        stated = [(k, habit) for habit in HABITS for k in classes_with(habit, dataset.habits, dataset.labels)]
        result.habits.add_case(scribble, reference if same else None, dataset.labels.count, stated)


def _check_strokes(dataset: Dataset, case: str, scribble: IntArray, result: CaseCheck, look: Preprocessing) -> None:
    drawn = scribble[scribble >= 0]
    result.strokes = np.bincount(drawn, minlength=dataset.labels.count).astype(np.int64)
    result.pixels = scribble.size
    reduced = look.reduced(scribble)
    result.kept = kept_pixels(scribble, reduced, dataset.labels.count)
    shown = set(np.unique(reduced).tolist())
    gone = [name for k, name in enumerate(dataset.labels.names) if result.strokes[k] and k not in shown]
    path = dataset.scribble_path(case)
    file = _relative(path, dataset.root)
    if drawn.size == 0:
        message = f"{path} has no stroke at all; the case takes part unlabelled, in methods that learn from such"
        result.findings.append(Finding("warning", EMPTY, message, case, file))
        return
    unlooked = dataset.not_annotated.get(case, ())
    counts = dict(zip(dataset.labels.names, result.strokes.tolist(), strict=True))
    absent = [name for name, count in counts.items() if count == 0 and name not in unlooked]
    if absent:
        message = f"{path} has no stroke of {', '.join(absent)}"
        result.findings.append(Finding("warning", "class without a stroke", message, case, file))
    if gone:
        h, w = look.size
        message = f"{path}: no stroke of {', '.join(gone)} is left at {h} x {w} pixels; use a larger data.size"
        result.findings.append(Finding("warning", "class vanishes", message, case, file))
    drawn_yet = [name for name in unlooked if counts[name]]
    if drawn_yet:
        message = f"{path} has strokes of {', '.join(drawn_yet)}, which dataset.json calls not annotated in this case"
        result.findings.append(Finding("warning", "not annotated", message, case, file))


def _contradictions(dataset: Dataset, case: str, scribble: IntArray, reference: IntArray) -> list[Finding]:
    """Pixels drawn as one class and annotated as another in the reference."""
    places = np.argwhere((scribble >= 0) & (reference >= 0) & (scribble != reference))
    if len(places) == 0:
        return []
    names = dataset.labels.names
    kinds = Counter((int(z), names[scribble[z, y, x]], names[reference[z, y, x]]) for z, y, x in places)
    path = dataset.scribble_path(case)
    shown = ", ".join(f"slice {z}: {count} {drawn} on {true}" for (z, drawn, true), count in sorted(kinds.items()))
    where = tuple(
        Contradiction(int(z), int(y), int(x), names[scribble[z, y, x]], names[reference[z, y, x]])
        for z, y, x in places[:_WHERE]
    )
    message = f"{path}: {len(places)} pixel{'s' * (len(places) > 1)} against the reference ({shown})"
    file = _relative(path, dataset.root)
    return [Finding("warning", "contradiction", message, case, file, len(places), where)]


def _sform_disagreement(grid: Geometry) -> str:
    implied = grid.sform_spacing
    if implied is None or np.allclose(implied, grid.spacing, rtol=1e-3, atol=1e-4):
        return ""
    in_sform, in_pixdim = (" x ".join(f"{v:.4g}" for v in s[::-1]) for s in (implied, grid.spacing))
    return f"{in_sform} mm in the sform, {in_pixdim} mm in pixdim (x, y, z)"


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()
