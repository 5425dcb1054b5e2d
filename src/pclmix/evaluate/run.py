"""`evaluate`: from two folders of label maps to a summary. The command line, crossval and the demo all call this."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pclmix.data.dataset import Dataset
from pclmix.data.splits import PATIENT_PATTERN, patient_of
from pclmix.errors import PclmixError
from pclmix.evaluate.bootstrap import Comparison, paired_bootstrap
from pclmix.evaluate.cases import Pair, dense_masks, label_files, match, score_pair
from pclmix.evaluate.metrics import NAN, Scores
from pclmix.evaluate.summary import MEASURES, CaseScores, Summary, read_summary
from pclmix.labels import FEW, Labels

Progress = Callable[[int, int], None]
_ABSENT = Scores("absent", NAN, NAN, NAN, NAN, 0.0, 0.0)


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

    `cases`, or the test cases of `fold` of a dataset, are the ones expected; a prediction that is missing is listed
    in `Summary.missing` and is in no mean. `against` is another folder of predictions, or an evaluation's JSON or
    CSV: differences with intervals are then in `Summary.against`. `progress(done, total)` is called after each case.
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

    def score_one(pair: Pair) -> dict[int, Scores]:
        return score_pair(pair, matched.labels, keep_largest=largest_component, ignore_headers=ignore_headers)

    by_number = []
    # Threads, not processes: a caller that holds a GPU, or a script without a __main__ guard, is safe.
    with ThreadPoolExecutor(max(1, min(workers, os.cpu_count() or 1))) as pool:
        for done, scores in enumerate(pool.map(score_one, matched.pairs), start=1):
            by_number.append(scores)
            if progress:
                progress(done, len(matched.pairs))
    names = _names(matched.labels, by_number)
    entries = tuple(
        CaseScores(pair.case, {name: scores.get(k, _ABSENT) for k, name in names.items()})
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
    )
    if against is None:
        return summary
    other = _other(Path(against), reference, summary, largest_component, ignore_headers, workers)
    comparison = compare_pair(summary, other, str(against), matched.patient_pattern)
    return dataclasses.replace(summary, against=comparison)


def _names(labels: Labels | None, by_number: Sequence[dict[int, Scores]]) -> dict[int, str]:
    """Foreground classes by number. Without a dataset they are called by it: 1 to the highest, or those that occur."""
    if labels is not None:
        return dict(enumerate(labels.foreground, start=1))
    found = sorted({k for scores in by_number for k in scores}) or [1]
    return {k: str(k) for k in (range(1, found[-1] + 1) if found[-1] <= FEW else found)}


def compare_pair(first: Summary, second: Summary, other: str, patient_pattern: str = PATIENT_PATTERN) -> Comparison:
    """Differences first minus second over the cases that both have."""
    if len(first.names) != len(second.names):
        raise PclmixError(f"{other} has {len(second.names)} classes, not {len(first.names)}; it is another task")
    shared = sorted({entry.case for entry in first.cases} & {entry.case for entry in second.cases})
    if not shared:
        raise PclmixError(f"{other} has no case in common with {first.prediction or 'these predictions'}")
    rows1, rows2 = ([{e.case: i for i, e in enumerate(s.cases)}[case] for case in shared] for s in (first, second))
    patients = [patient_of(case, patient_pattern) for case in shared]
    values = {m: (first.values(m)[rows1], second.values(m)[rows2]) for m in MEASURES}
    return Comparison(
        other,
        len(set(patients)),
        {m: paired_bootstrap(a, b, patients) for m, (a, b) in values.items()},
        {
            name: {m: paired_bootstrap(a[:, k], b[:, k], patients) for m, (a, b) in values.items()}
            for k, name in enumerate(first.names)
        },
    )


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
