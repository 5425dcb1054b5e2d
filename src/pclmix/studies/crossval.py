"""Cross-validation: train, predict and evaluate each fold, then one summary over all cases. Every part resumes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pclmix.cluster.engine import HERE, ClusterOptions
from pclmix.config import load_config
from pclmix.data.dataset import SPLITS, Dataset
from pclmix.errors import PclmixError
from pclmix.methods.base import build_params, find_method
from pclmix.metrics import Summary, read_summary
from pclmix.studies.execute import ANY, Devices, execute
from pclmix.studies.plan import CASES, EVALUATION, Run, Settings, Study
from pclmix.training.plan import training_cases


@dataclass(frozen=True)
class CrossValidation:
    """Summaries of the folds that have references, by fold, and of all their cases; None where there are none."""

    folds: dict[int, Summary]
    summary: Summary | None


def parse_folds(text: str, count: int) -> list[int]:
    """Folds such as `1-5`, `1,3` or `all` of a dataset that has `count`.

    >>> parse_folds("1-2,4", 5), parse_folds("all", 3)
    ([1, 2, 4], [1, 2, 3])
    """
    if text == "all":
        return list(range(1, count + 1))
    folds: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise PclmixError(f"--folds {text}: '{part}' is not a fold; write 1-5, 1,3 or all")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise PclmixError(f"--folds {text}: '{part.strip()}' runs backwards; write {last}-{first}")
        if not 1 <= first <= last <= count:
            raise PclmixError(
                f"--folds {text}: the dataset has folds 1 to {count}; `pclmix split` makes others, "
                "at most one for each patient"
            )
        folds.update(range(first, last + 1))
    return sorted(folds)


def cross_validate(
    dataset: Path,
    out: Path,
    settings: Settings,
    *,
    folds: str = "all",
    devices: Devices = ANY,
    cluster: ClusterOptions = HERE,
    console: Console | None = None,
) -> CrossValidation:
    """Run the folds into OUT/fold1, OUT/fold2, ..., one after the other or on a cluster.

    Called again with the same settings it goes on where it stopped; other folds may be added so. Each fold gets
    predictions/, evaluation.json and cases.csv, OUT gets the two files over all cases of all folds run so far.
    KeyboardInterrupt when somebody stopped it; what was reached is saved.
    """
    console = console or Console(stderr=True)
    dataset, out = Path(dataset).resolve(), Path(out).resolve()
    data = Dataset.open(dataset)
    chosen = check_folds(data, folds)
    check_settings(settings)
    runs = tuple(Run(f"fold{fold}", fold, settings) for fold in chosen)
    study = Study(out, "crossval", dataset, runs)
    failed = execute(study, runs, devices, cluster, console)
    require_none(failed, len(runs))
    return summarise(data, out)


def check_folds(data: Dataset, folds: str) -> list[int]:
    """The folds that `folds` names; refused where one has nothing to train on or two test the same case."""
    chosen = parse_folds(folds, len(data.splits()))
    _require_disjoint(data, chosen)
    for fold in chosen:
        training_cases(data, fold)
    return chosen


def check_settings(settings: Settings) -> None:
    """Refuse a misspelt key now, not after the first hours."""
    config = load_config(settings.recipe, settings.method, settings.overrides)
    build_params(find_method(config.method), config.params)


def require_none(failed: dict[str, str], count: int) -> None:
    """One error that lists every run that failed; the others are finished."""
    if failed:
        lines = "\n".join(f"  {name}: {reason}" for name, reason in failed.items())
        raise PclmixError(f"{len(failed)} of {count} runs failed; the same command runs them again:\n{lines}")


def _require_disjoint(data: Dataset, folds: Sequence[int]) -> None:
    seen: dict[str, int] = {}
    for fold in folds:
        for case in data.fold(fold).test:
            if case in seen:
                raise PclmixError(
                    f"{data.root / SPLITS}: case '{case}' is tested by fold {seen[case]} and fold {fold}; "
                    "a summary over all cases needs each case once"
                )
            seen[case] = fold


def summarise(data: Dataset, out: Path) -> CrossValidation:
    """The folds that are in OUT, and evaluation.json and cases.csv over all their cases."""
    found = {fold: out / f"fold{fold}" / EVALUATION for fold in range(1, len(data.splits()) + 1)}
    folds = {fold: read_summary(path) for fold, path in found.items() if path.is_file()}
    if not folds:
        return CrossValidation({}, None)
    cases = sorted((entry for part in folds.values() for entry in part.cases), key=lambda entry: entry.case)
    summary = Summary(
        data.labels.foreground,
        tuple(cases),
        prediction=str(out),
        reference=str(data.root),
        largest_component=next(iter(folds.values())).largest_component,
        unit=next(iter(folds.values())).unit,
    )
    summary.write_csv(out / CASES)
    summary.write_json(out / EVALUATION)
    return CrossValidation(folds, summary)
