"""What must hold before anyone trains: every file of a dataset is read, and what is wrong becomes a finding."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pclmix.data.dataset import IMAGES, REFERENCE, SPLITS, Dataset, read_channels
from pclmix.data.findings import ClassShare, Contradiction, Finding, Report
from pclmix.data.splits import Split, patient_of
from pclmix.data.volume import ENDINGS, Geometry, ending_of
from pclmix.errors import PclmixError, nearest
from pclmix.labels import IntArray
from pclmix.progress import in_threads

_WHERE = 50  # places kept of one case's contradictions


@dataclass
class _Case:
    """What reading one case brought to light."""

    findings: list[Finding] = field(default_factory=list)
    strokes: IntArray | None = None  # pixels drawn, by class
    pixels: int = 0
    sform: str = ""  # how sform and pixdim disagree


def check(
    dataset: Dataset, cases: Sequence[str] | None = None, *, references: bool = True, show: bool = False
) -> Report:
    """Read every file of `cases` (default: all) and report. With `references` False no dense mask is opened."""
    chosen = tuple(dataset.cases if cases is None else cases)
    found = in_threads(lambda case: _check_case(dataset, case, references), chosen, "checking", show=show)
    findings = [*_check_layout(dataset), *check_splits(dataset)]
    findings += [finding for case in found for finding in case.findings]
    findings += _sform_warning([(case, result.sform) for case, result in zip(chosen, found, strict=True)])
    return Report(
        str(dataset.root),
        len(chosen),
        sum(dataset.has_reference(case) for case in chosen),
        _shares(dataset.labels.names, found),
        tuple(sorted(findings, key=lambda f: f.level)),
    )


def check_folder(root: Path, *, show: bool = False) -> Report:
    """`check` of a folder; where not even dataset.json can be read, that is the one finding."""
    try:
        dataset = Dataset.open(root)
    except PclmixError as error:
        return Report(str(root), findings=(Finding("error", "dataset", str(error), file="dataset.json"),))
    return check(dataset, show=show)


def require_sound(
    dataset: Dataset, cases: Sequence[str] | None = None, *, references: bool = False, show: bool = False
) -> Report:
    """Refuse a dataset with errors, as training does first. Dense masks stay closed unless `references` is set."""
    report = check(dataset, cases, references=references, show=show)
    if report.errors:
        raise PclmixError(report.refusal())
    return report


def check_splits(dataset: Dataset) -> list[Finding]:
    """Folds are disjoint, and no patient is on both sides of one."""
    path = dataset.root / SPLITS
    try:
        splits = dataset.splits()
    except PclmixError as error:
        return [Finding("error", "splits", str(error), file=SPLITS)]
    way = f"make new folds with `pclmix split {dataset.root} --folds N`"
    return [
        Finding("error", "splits", f"{path}: {problem}; {way}", file=SPLITS)
        for problem in _split_problems(splits, dataset.patient_pattern)
    ]


def _split_problems(splits: Sequence[Split], pattern: str) -> list[str]:
    problems = []
    tested: dict[str, int] = {}
    for number, split in enumerate(splits, start=1):
        for name, part in (("train", split.train), ("val", split.test)):
            twice = [case for case, times in Counter(part).items() if times > 1]
            if twice:
                problems.append(f"case '{twice[0]}' is named twice in '{name}' of fold {number}")
        both = sorted(set(split.train) & set(split.test))
        patients = {patient_of(case, pattern) for case in split.train}
        shared = sorted({patient_of(case, pattern) for case in split.test} & patients)
        if both:
            problems.append(f"case '{both[0]}' is in 'train' and in 'val' of fold {number}")
        elif shared:
            problems.append(f"patient '{shared[0]}' is in 'train' and in 'val' of fold {number}")
        again = [case for case in dict.fromkeys(split.test) if case in tested]
        if again:
            problems.append(f"case '{again[0]}' is in two folds, {tested[again[0]]} and {number}")
        tested.update((case, number) for case in split.test if case not in tested)
    return problems


def _check_layout(dataset: Dataset) -> list[Finding]:
    """Names that belong to no case, and counts that dataset.json has wrong."""
    root, ending = dataset.root, dataset.ending
    findings = []

    def error(kind: str, message: str, file: str, case: str = "") -> None:
        findings.append(Finding("error", kind, message, case, file))

    if not dataset.cases:
        others = sorted({ending_of(p) for p in _files(root / IMAGES)} - {"", ending})
        hint = f"; there are files ending in {', '.join(others)}: is file_ending right?" if others else ""
        error("missing", f"{root / IMAGES} holds no CASE_0000{ending}{hint}", IMAGES)
    elif dataset.num_training != len(dataset.cases):
        message = f"{root / 'dataset.json'}: numTraining is {dataset.num_training}, but {len(dataset.cases)} cases are"
        error("dataset", f"{message} there; correct the number or complete the files", "dataset.json")
    for path in _files(root / IMAGES):
        match = re.match(r"^(.+)_(\d{4})$", path.name[: -len(ending_of(path))])
        file = f"{IMAGES}/{path.name}"
        if ending_of(path) != ending:
            error("missing", f"{path} does not end in {ending}, the file_ending of dataset.json; convert it", file)
        elif match is None:
            error("missing", f"{path} has no channel number; rename it to CASE_0000{ending}", file)
        elif int(match.group(2)) >= len(dataset.channels):
            message = f"{path} is channel {int(match.group(2))}, but channel_names of dataset.json has "
            error("dataset", f"{message}{len(dataset.channels)}; add its name or move the file away", file)
    for path in _files(root / REFERENCE):
        case = path.name[: -len(ending_of(path))]
        if case not in dataset.cases or ending_of(path) != ending:
            message = f"{path} is a reference without an image.{nearest(case, dataset.cases)} Rename it or move it away"
            error("missing", message, f"{REFERENCE}/{path.name}", case)
    return findings


def _files(folder: Path) -> list[Path]:
    """Image files of a folder, hidden ones left out."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(p for p in paths if ending_of(p) in ENDINGS and not p.name.startswith("."))


def _check_case(dataset: Dataset, case: str, references: bool) -> _Case:
    result = _Case()
    try:
        _read_case(dataset, case, references, result)
    except Exception as error:  # whatever a file can do to us, the others are still looked at
        message = f"case '{case}' of {dataset.root} cannot be checked: {type(error).__name__}: {error}"
        result.findings.append(Finding("error", "unreadable", message, case))
    return result


def _read_case(dataset: Dataset, case: str, references: bool, result: _Case) -> None:
    image_paths, scribble_path = dataset.image_paths(case), dataset.scribble_path(case)
    grid: Geometry | None = None
    scribble: IntArray | None = None

    def error(kind: str, message: str, path: Path) -> None:
        result.findings.append(Finding("error", kind, message, case, _relative(path, dataset.root)))

    missing = [path for path in image_paths if not path.exists()]
    if missing:
        error("missing", f"{missing[0]} does not exist, but case '{case}' needs it; add it", missing[0])
    else:
        try:
            grid = read_channels(image_paths, len(dataset.channels)).geometry
            result.sform = _sform_disagreement(grid)
        except PclmixError as problem:
            error("unreadable", str(problem), image_paths[0])

    def labels(path: Path, read: Any) -> IntArray | None:
        try:
            array, geometry = read(case)
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
        scribble = labels(scribble_path, dataset.read_scribble)
    if scribble is not None:
        _check_strokes(dataset, case, scribble, result)
    if references and dataset.reference_path(case).exists():
        reference = labels(dataset.reference_path(case), dataset.read_reference)
        if scribble is not None and reference is not None:
            result.findings += _contradictions(dataset, case, scribble, reference)


def _check_strokes(dataset: Dataset, case: str, scribble: IntArray, result: _Case) -> None:
    drawn = scribble[scribble >= 0]
    result.strokes = np.bincount(drawn, minlength=dataset.labels.count).astype(np.int64)
    result.pixels = scribble.size
    path = dataset.scribble_path(case)
    file = _relative(path, dataset.root)
    if drawn.size == 0:
        message = f"{path} has no stroke at all; draw some, or leave the case out"
        result.findings.append(Finding("error", "empty", message, case, file))
        return
    absent = [name for name, count in zip(dataset.labels.names, result.strokes, strict=True) if count == 0]
    if absent:
        message = f"{path} has no stroke of {', '.join(absent)}"
        result.findings.append(Finding("warning", "class without a stroke", message, case, file))


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


def _sform_warning(disagreements: Sequence[tuple[str, str]]) -> list[Finding]:
    """One warning for the whole dataset: it is a habit of whoever wrote the files, not of one case."""
    found = [(case, text) for case, text in disagreements if text]
    if not found:
        return []
    case, text = found[0]
    message = (
        f"sform and pixdim disagree in {len(found)} of {len(disagreements)} images, {case} for one: {text}. "
        "Millimetres are taken from pixdim; the files are left as they are"
    )
    return [Finding("warning", "sform", message, count=len(found))]


def _shares(names: Sequence[str], found: Sequence[_Case]) -> tuple[ClassShare, ...]:
    read = [case for case in found if case.strokes is not None]
    strokes = np.array([case.strokes for case in read]).reshape(-1, len(names))
    pixels = max(1, sum(case.pixels for case in read))
    return tuple(
        ClassShare(name, int(column.sum()), float(column.sum() / pixels), int((column > 0).sum()))
        for name, column in zip(names, strokes.T, strict=True)
    )


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()
