"""`evaluate`: from two folders of label maps to a summary."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.io.volume import Unit, stem_of
from pclmix.labels import FEW, Labels
from pclmix.metrics.cases import Pair, Scored, dense_masks, label_files, match, score_pair
from pclmix.metrics.comparison import compare_pair
from pclmix.metrics.functional import NAN, Scores
from pclmix.metrics.summary import CaseScores, Summary, read_summary

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
    # Threads, not processes: a caller that holds a GPU, or a script without a __main__ guard, is safe.
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
    """Foreground classes by number. Without a dataset the number is the name: 1 to the highest, or those that occur."""
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
