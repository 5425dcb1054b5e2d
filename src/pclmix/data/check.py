"""`pclmix check`: read every file of a dataset and report problems as findings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pclmix.config import Data
from pclmix.data.case import EMPTY, CaseCheck, CaseFiles, ClassShare, Finding, Report, check_case
from pclmix.data.dataset import IMAGES, REFERENCE, SCRIBBLES, SPLITS, Dataset, Split, patient_of
from pclmix.data.habits import CASES, HOLDS, HabitReport, Tally
from pclmix.data.preprocess import Preprocessing
from pclmix.errors import PclmixError, nearest
from pclmix.io.threads import in_threads
from pclmix.io.volume import ENDINGS, ending_of


def check(
    dataset: Dataset,
    cases: Sequence[str] | None = None,
    *,
    references: bool = True,
    habits: bool = True,
    size: tuple[int, int] | None = None,
    show: bool = False,
) -> Report:
    """Read every file of `cases` (default: all) and report. With `references` False no dense mask is opened.

    `habits` tests stroke habits in up to CASES cases. `size` is the working size (H, W) at which strokes are
    examined, by default that of the settings.
    """
    look = Preprocessing(size or Data().size)
    chosen = tuple(dataset.cases if cases is None else cases)
    asked = set(chosen[:: -(-len(chosen) // CASES)]) if habits and chosen else set()
    found = in_threads(
        lambda case: check_case(CaseFiles(dataset, case), references, case in asked, look),
        chosen,
        "checking",
        show=show,
    )
    findings = check_layout(dataset)
    findings += _merged_channels([finding for case in found for finding in case.findings], dataset)
    findings += _all_empty(dataset, found)
    tally = Tally()
    for case in found:
        tally.merge(case.habits or Tally())
    seen = tally.report(dataset.labels, dataset.habits)
    findings += _habit_warnings(dataset, seen)
    findings += _sform_warning([(case, result.sform) for case, result in zip(chosen, found, strict=True)])
    return Report(
        str(dataset.root),
        len(chosen),
        sum(dataset.has_reference(case) for case in chosen),
        _shares(dataset.labels.names, found),
        tuple(sorted(findings, key=lambda f: f.level)),
        seen,
        look.size,
    )


def check_folder(root: Path, *, size: tuple[int, int] | None = None, show: bool = False) -> Report:
    """`check` of a folder; if dataset.json cannot be read, that is the only finding."""
    try:
        dataset = Dataset.open(root)
    except PclmixError as error:
        return Report(str(root), findings=(Finding("error", "dataset", str(error), file="dataset.json"),))
    return check(dataset, size=size, show=show)


def require_sound(dataset: Dataset, findings: Sequence[Finding]) -> None:
    """Raise one error if there are errors among the findings."""
    merged = _merged_channels(list(findings), dataset)
    report = Report(str(dataset.root), findings=tuple(sorted(merged, key=lambda f: f.level)))
    if report.errors:
        raise PclmixError(report.refusal())


def check_layout(dataset: Dataset) -> list[Finding]:
    """Errors in names of files, in counts and in folds; no image is opened."""
    return [*_check_names(dataset), *check_splits(dataset)]


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


def _check_names(dataset: Dataset) -> list[Finding]:
    """Names that belong to no case, and wrong counts in dataset.json."""
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
    extra = []
    for path in _files(root / IMAGES):
        match = re.match(r"^(.+)_(\d{4})$", path.name[: -len(ending_of(path))])
        file = f"{IMAGES}/{path.name}"
        if ending_of(path) != ending:
            error("missing", f"{path} does not end in {ending}, the file_ending of dataset.json; convert it", file)
        elif match is None:
            error("missing", f"{path} has no channel number; rename it to CASE_0000{ending}", file)
        elif int(match.group(2)) >= len(dataset.channels):
            extra.append(path)
    if extra:
        message = (
            f"{extra[0]} is channel {int(extra[0].name[: -len(ending)][-4:])}, but channel_names of dataset.json has "
            f"{len(dataset.channels)}; add its name or move the file away"
        )
        message += f" ({len(extra)} such files)" if len(extra) > 1 else ""
        error("dataset", message, f"{IMAGES}/{extra[0].name}")
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


def _all_empty(dataset: Dataset, found: Sequence[CaseCheck]) -> list[Finding]:
    """Unlabelled cases are allowed if others are labelled."""
    read = [case for case in found if case.strokes is not None]
    if not read or any(case.strokes is not None and case.strokes.sum() for case in read):
        return []
    message = f"{dataset.root}: no case has a stroke; draw some"
    return [Finding("error", EMPTY, message, file=SCRIBBLES, count=len(read))]


def _merged_channels(findings: list[Finding], dataset: Dataset) -> list[Finding]:
    """One finding for all images whose channels differ from dataset.json: the mistake is there."""
    wrong = [finding for finding in findings if finding.kind == "channels"]
    if len(wrong) < 2:
        return findings
    message = (
        f"{dataset.root / 'dataset.json'}: channel_names names {len(dataset.channels)} channels, which "
        f"{len(wrong)} cases do not have, such as {wrong[0].case}: {wrong[0].message}"
    )
    one = Finding("error", "channels", message, wrong[0].case, "dataset.json", len(wrong))
    return [one, *(finding for finding in findings if finding.kind != "channels")]


def _habit_warnings(dataset: Dataset, seen: Sequence[HabitReport]) -> list[Finding]:
    """Stated habits that do not hold, or that no slice could test."""
    found = []
    for habit in seen:
        if not habit.stated or habit.best.share >= HOLDS:
            continue
        source = "dense masks" if habit.masks.tested else "strokes"
        text = (
            f"by the {source}, it holds in {habit.best.held} of {habit.best.tested} slices"
            if habit.best.tested
            else "no slice could be tested (is the class drawn, and for 'midline' a class inside it?)"
        )
        message = f"{dataset.root / 'dataset.json'}: habit '{habit.habit}' of {habit.name}: {text}"
        found.append(
            Finding("warning", "habit", message, file="dataset.json", count=habit.best.tested - habit.best.held)
        )
    return found


def _sform_warning(disagreements: Sequence[tuple[str, str]]) -> list[Finding]:
    """One warning for the whole dataset: it comes from the software that wrote the files."""
    found = [(case, text) for case, text in disagreements if text]
    if not found:
        return []
    case, text = found[0]
    message = (
        f"sform and pixdim disagree in {len(found)} of {len(disagreements)} images, such as {case}: {text}. "
        "Millimetres are taken from pixdim; the files are left as they are"
    )
    return [Finding("warning", "sform", message, count=len(found))]


def _shares(names: Sequence[str], found: Sequence[CaseCheck]) -> tuple[ClassShare, ...]:
    read = [case for case in found if case.strokes is not None]
    strokes = np.array([case.strokes for case in read]).reshape(-1, len(names))
    kept = np.array([case.kept for case in read]).reshape(-1, len(names)).sum(axis=0)
    pixels = max(1, sum(case.pixels for case in read))
    drawn = strokes.sum(axis=0)
    cases = (strokes > 0).sum(axis=0)
    left = np.where(drawn > 0, kept / np.maximum(drawn, 1), 1.0)
    return tuple(
        ClassShare(name, int(drawn[k]), float(drawn[k] / pixels), int(cases[k]), float(left[k]))
        for k, name in enumerate(names)
    )
