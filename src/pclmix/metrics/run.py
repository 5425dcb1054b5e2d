"""`evaluate`: match predictions to references by case name, score each pair, summarise."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pclmix.data.dataset import PATIENT_PATTERN, REFERENCE, SCRIBBLES, SPLITS, Dataset
from pclmix.errors import PclmixError, nearest, require_names
from pclmix.io.volume import ENDINGS, Unit, ending_of, read_labels, stem_of
from pclmix.labels import FEW, IGNORE, Labels, largest_component, looks_like_image
from pclmix.metrics.comparison import compare_pair
from pclmix.metrics.functional import NAN, Scores, score
from pclmix.metrics.summary import CaseScores, Summary, read_summary

#: A prediction with labels above this is an image, unless its reference has such labels too (as 205 and 850).
USUAL_HIGHEST = 255


@dataclass(frozen=True)
class Pair:
    case: str
    prediction: Path
    reference: Path


@dataclass(frozen=True)
class Match:
    """Pairs to score, and files without a partner.

    `labels` is None where the reference is a bare folder; the classes are then the values in the files.
    """

    pairs: tuple[Pair, ...]
    missing: tuple[str, ...]  #: expected cases without a prediction
    without_reference: tuple[str, ...]  #: predicted cases without a reference
    labels: Labels | None
    patient_pattern: str


def match(prediction: Path, reference: Path, cases: Sequence[str] | None = None) -> Match:
    """Pair files by case name. Each side is a file or a folder; the reference may be a dataset.

    Two files are a pair regardless of names. Expected are `cases` if given, else every reference; of a dataset with
    splits, the test cases of the folds with any prediction; of one without, the predicted cases.
    """
    if prediction.is_file() and reference.is_file():
        return Match((Pair(stem_of(reference), prediction, reference),), (), (), None, PATIENT_PATTERN)
    dataset = _dataset_of(reference)
    truths = label_files(reference if dataset is None or not _is_dataset(reference) else dense_masks(dataset))
    guesses = label_files(_prediction_folder(prediction))
    require_names("cases", cases)
    if cases is not None:
        unknown = [case for case in cases if case not in truths]
        if unknown:
            raise PclmixError(f"{reference} has no reference for case '{unknown[0]}'.{nearest(unknown[0], truths)}")
        expected: Iterable[str] = cases
    elif prediction.is_file():
        expected = guesses
    else:
        expected = _expected(dataset, set(guesses), set(truths))
    wanted = sorted(set(expected))
    paired = [case for case in wanted if case in guesses and case in truths]
    if not paired:
        asked = "a case that was asked for" if cases is not None else "a reference"
        raise PclmixError(
            f"no prediction in {prediction} has the name of {asked} in {reference}: "
            f"{_sample(guesses)} and {_sample(truths if cases is None else cases)}; "
            "name each prediction after its case"
        )
    return Match(
        tuple(Pair(case, guesses[case], truths[case]) for case in paired),
        tuple(case for case in wanted if case not in guesses),
        tuple(sorted(set(guesses) - set(truths))),
        dataset.labels if dataset is not None and _is_dataset(reference) else None,
        dataset.patient_pattern if dataset is not None else PATIENT_PATTERN,
    )


@dataclass(frozen=True)
class Scored:
    """Scores of one pair by class number, and the unit of their distances."""

    classes: dict[int, Scores]
    unit: Unit


def score_pair(
    pair: Pair, labels: Labels | None, *, keep_largest: bool = False, ignore_headers: bool = False
) -> Scored:
    """Score one pair with the reference's spacing; voxels that it does not annotate count for neither mask."""
    prediction, predicted_grid = read_labels(pair.prediction)
    reference, grid = read_labels(pair.reference)
    difference = grid.same_grid(predicted_grid)
    if difference and not (ignore_headers and grid.shape == predicted_grid.shape):
        way_out = (
            "predict on the images of this reference"
            if grid.shape != predicted_grid.shape
            else "if only the header is wrong, --ignore-headers compares voxel by voxel with the reference's spacing"
        )
        raise PclmixError(f"{pair.reference} and {pair.prediction}: {difference}; {way_out}")
    truth = _decode(reference, labels, pair.reference)
    predicted = _decode(prediction, labels, pair.prediction)
    if labels is None and predicted.max() > max(USUAL_HIGHEST, truth.max()):
        raise PclmixError(
            f"{pair.prediction} has the label value {predicted.max()}, but the highest one in {pair.reference} is "
            f"{truth.max()}; check whether it is an image, or a label map with other values"
        )
    predicted = np.where(truth == IGNORE, IGNORE, predicted)
    classes = range(1, labels.count) if labels is not None else _values(predicted, truth)
    if keep_largest:
        predicted = largest_component(predicted, classes)
    spacing = grid.spacing if grid.unit == "mm" else None
    return Scored({k: score(predicted == k, truth == k, spacing) for k in classes}, grid.unit)


def label_files(path: Path) -> dict[str, Path]:
    """The label maps of a folder, or one file, by case name."""
    if not path.exists():
        raise PclmixError(f"{path} does not exist")
    if path.is_file():
        return {stem_of(path): path}
    found: dict[str, Path] = {}
    for file in sorted(path.iterdir()):
        if file.is_file() and ending_of(file) and not file.name.startswith("."):
            case = stem_of(file)
            if case in found:
                raise PclmixError(f"{found[case]} and {file} are both case '{case}'; keep one of them")
            found[case] = file
    if not found:
        raise PclmixError(f"{path} holds no label maps ({', '.join(ENDINGS)})")
    return found


def _decode(array: npt.NDArray[np.integer[Any]], labels: Labels | None, where: Path) -> npt.NDArray[Any]:
    if labels is not None:
        return labels.decode(array, str(where))
    if array.min() < 0 or array.max() >= 2**31 or looks_like_image(array):
        raise PclmixError(
            f"{where} looks like an image, not a label map: {len(np.unique(array))} values from {array.min()} to "
            f"{array.max()}; give a label map, such as `pclmix predict` writes"
        )
    return array.astype(np.int32)


def _values(predicted: npt.NDArray[Any], truth: npt.NDArray[Any]) -> list[int]:
    """The foreground labels in either map."""
    return [int(k) for k in np.union1d(predicted, truth) if k > 0]


def _is_dataset(path: Path) -> bool:
    return (path / "dataset.json").is_file()


def _dataset_of(reference: Path) -> Dataset | None:
    """The dataset at this path, or the dataset whose referenceTr it is."""
    if _is_dataset(reference):
        return Dataset.open(reference)
    if reference.name == REFERENCE and _is_dataset(reference.parent):
        return Dataset.open(reference.parent)
    return None


def dense_masks(dataset: Dataset) -> Path:
    """The folder referenceTr, or labelsTr where the labels have no 'ignore' and are therefore dense."""
    if (dataset.root / REFERENCE).is_dir():
        return dataset.root / REFERENCE
    if dataset.labels.ignore is None:
        return dataset.root / SCRIBBLES
    raise PclmixError(f"{dataset.root} has no dense masks to score with; put them into {dataset.root / REFERENCE}")


def _prediction_folder(path: Path) -> Path:
    """The folder `predictions` of a run, or the path itself."""
    inner = path / "predictions"
    if not inner.is_dir() and (path / "last.ckpt").is_file():
        raise PclmixError(f"{path} is a run without predictions; run `pclmix predict {path} DATASET {inner}` first")
    return inner if inner.is_dir() else path


def _expected(dataset: Dataset | None, predicted: set[str], known: set[str]) -> set[str]:
    if dataset is None:
        return known
    if not (dataset.root / SPLITS).is_file():
        return predicted & known
    folds = [set(split.test) for split in dataset.splits()]
    in_folds: set[str] = set().union(*(fold for fold in folds if fold & predicted))
    return (in_folds | predicted) & known


def _sample(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:2]) + (", ..." if len(listed) > 2 else "")


Progress = Callable[[int, int], None]
#: Scores of a class that neither file of a case has.
_ABSENT: dict[Unit, Scores] = {
    "mm": Scores("absent", NAN, NAN, NAN, NAN, 0.0, 0.0),
    "px": Scores("absent", NAN, NAN, NAN, NAN, NAN, NAN),
}


def evaluate(
    prediction: Path | str,
    reference: Path | str,
    *,
    cases: Sequence[str] | None = None,
    fold: int | None = None,
    against: Path | str | None = None,
    largest_component: bool = False,
    ignore_headers: bool = False,
    workers: int = 2,
    progress: Progress | None = None,
) -> Summary:
    """Score predictions, files or folders, against references or a dataset's `referenceTr`, matched by case name.

    Expected are `cases`, or the test cases of `fold` of a dataset. A missing prediction is listed in `Summary.missing`
    and is in no mean. `against` is another folder of predictions, or the JSON or CSV of an evaluation; differences with
    intervals are then in `Summary.against`. `progress(done, total)` is called after each case.
    """
    prediction, reference = Path(prediction), Path(reference)
    if fold is not None:
        if cases is not None:
            raise ValueError("give `cases` or `fold`, not both")
        dataset = Dataset.open(reference)
        masks = dense_masks(dataset)
        known = label_files(masks)
        cases = [case for case in dataset.fold(fold).test if case in known]
        if not cases:
            raise PclmixError(f"{reference}: no test case of fold {fold} has a dense mask in {masks.name}")
    matched = match(prediction, reference, cases)

    def score_one(pair: Pair) -> Scored:
        return score_pair(pair, matched.labels, keep_largest=largest_component, ignore_headers=ignore_headers)

    scored: list[Scored] = []
    # Threads: safe for callers that hold a GPU and for scripts without a __main__ guard.
    with ThreadPoolExecutor(max(1, min(workers, os.cpu_count() or 1))) as pool:
        for done, result in enumerate(pool.map(score_one, matched.pairs), start=1):
            scored.append(result)
            if progress:
                progress(done, len(matched.pairs))
    by_number = [result.classes for result in scored]
    unit = _unit([result.unit for result in scored], matched.pairs)
    names = _names(matched.labels, by_number)
    entries = tuple(
        CaseScores(pair.case, {name: scores.get(k, _ABSENT[unit]) for k, name in names.items()})
        for pair, scores in zip(matched.pairs, by_number, strict=True)
    )
    summary = Summary(
        tuple(names.values()),
        entries,
        matched.missing,
        matched.without_reference,
        str(prediction),
        str(reference),
        largest_component,
        unit=unit,
    )
    if against is None:
        return summary
    other = _other(Path(against), reference, summary, largest_component, ignore_headers, workers)
    comparison = compare_pair(summary, other, str(against), matched.patient_pattern)
    return dataclasses.replace(summary, against=comparison)


def _unit(units: Sequence[Unit], pairs: Sequence[Pair]) -> Unit:
    """The unit of all cases; distances in mm and in px cannot be averaged."""
    if len(set(units)) > 1:
        known, unknown = (pairs[units.index(unit)].reference for unit in ("mm", "px"))
        raise PclmixError(
            f"{unknown} has no spacing and {known} has one; give the spacing of the first in "
            f'{stem_of(unknown)}.json, as in {{"spacing": [0.5, 0.5]}}, or remove that of the others'
        )
    return units[0]


def _names(labels: Labels | None, by_number: Sequence[dict[int, Scores]]) -> dict[int, str]:
    """Foreground classes by number. Without a dataset they are named by number: 1 to the highest, or those present."""
    if labels is not None:
        return dict(enumerate(labels.foreground, start=1))
    found = sorted({k for scores in by_number for k in scores}) or [1]
    return {k: str(k) for k in (range(1, found[-1] + 1) if found[-1] <= FEW else found)}


def _other(
    path: Path, reference: Path, summary: Summary, keep_largest: bool, ignore_headers: bool, workers: int
) -> Summary:
    if path.suffix in (".json", ".csv"):
        return read_summary(path)
    return evaluate(
        path,
        reference,
        cases=None if reference.is_file() else [entry.case for entry in summary.cases],
        largest_component=keep_largest,
        ignore_headers=ignore_headers,
        workers=workers,
    )
