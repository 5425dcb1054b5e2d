"""One case of a dataset, read in full: what is wrong with its files, and what was drawn in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pclmix.data.case_files import CaseFiles, Source
from pclmix.data.dataset import ChannelError, Dataset
from pclmix.data.findings import Contradiction, Finding
from pclmix.data.habits import HABITS, Tally, classes_with
from pclmix.data.preprocess import Preprocessing, kept_pixels
from pclmix.errors import PclmixError
from pclmix.io.volume import Geometry
from pclmix.labels import IntArray

EMPTY = "empty"  #: kind of the finding of a case without strokes
_WHERE = 50  # places kept of one case's contradictions


@dataclass
class CaseCheck:
    """What reading one case brought to light."""

    findings: list[Finding] = field(default_factory=list)
    strokes: npt.NDArray[np.int64] | None = None  # pixels drawn, by class
    kept: npt.NDArray[np.int64] | None = None  # those that the working size still shows
    pixels: int = 0
    sform: str = ""  # how sform and pixdim disagree
    habits: Tally | None = None  # stroke habits, in the cases that are looked at for them


def check_case(files: CaseFiles, references: bool, habits: bool, look: Preprocessing) -> CaseCheck:
    """Check the files of a case; with `references` also the dense mask, where there is one."""
    result = CaseCheck(habits=Tally() if habits else None)
    try:
        _check(files, references, result, look)
    except Exception as error:  # damaged files raise errors of many types; the other cases are still checked
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
    if scribble is not None and result.habits is not None:
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
    """Pixels drawn as one class that the reference has as another; pixels the reference leaves open do not count."""
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
