"""Studies of several trainings: cross-validation, the ablation of the paper, grids of settings."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from rich.console import Console

from pclmix.cluster.engine import HERE, ClusterOptions
from pclmix.config import load_config
from pclmix.data.dataset import SPLITS, Dataset
from pclmix.errors import PclmixError
from pclmix.methods.base import build_params, find_method
from pclmix.metrics import Summary, read_summary
from pclmix.report import figures, tables
from pclmix.report.pages import compare
from pclmix.report.tables import Table
from pclmix.studies.execute import ANY, Devices, execute
from pclmix.studies.plan import CASES, EVALUATION, Run, Settings, Study
from pclmix.training.plan import training_cases


@dataclass(frozen=True)
class CrossValidation:
    """Summaries by fold, for folds with references, and of all their cases; None without references."""

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

    A repeated call with the same settings continues; other folds may be added. Each fold gets predictions/,
    evaluation.json and cases.csv, OUT gets the two files over all cases of all folds run so far. Raises
    KeyboardInterrupt when stopped; the progress is saved.
    """
    console = console or Console(stderr=True)
    dataset, out = Path(dataset).resolve(), Path(out).resolve()
    data = Dataset.open(dataset)
    chosen = check_folds(data, folds)
    check_settings(settings)
    tables = tuple(Run(f"fold{fold}", fold, settings) for fold in chosen)
    study = Study(out, "crossval", dataset, tables)
    failed = execute(study, tables, devices, cluster, console)
    require_none(failed, len(tables))
    return summarise(data, out)


def check_folds(data: Dataset, folds: str) -> list[int]:
    """The folds of `folds`; refuses folds without training cases and overlapping test cases."""
    chosen = parse_folds(folds, len(data.splits()))
    _require_disjoint(data, chosen)
    for fold in chosen:
        training_cases(data, fold)
    return chosen


def check_settings(settings: Settings) -> None:
    """Refuse invalid settings before training."""
    config = load_config(settings.recipe, settings.method, settings.overrides)
    build_params(find_method(config.method), config.params)


def require_none(failed: dict[str, str], count: int) -> None:
    """Raise one error that lists all failed runs."""
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


TABLE = "comparison"
METHOD = "method"  #: the key of a grid for method names


@dataclass(frozen=True)
class Variant:
    """One row of the table: name, folder and settings."""

    name: str
    folder: str
    overrides: tuple[str, ...]
    method: str | None = None  #: if it differs from that of the study

    def settings(self, common: Settings) -> Settings:
        return replace(common, method=self.method or common.method, overrides=(*common.overrides, *self.overrides))


def run_study(
    dataset: Path,
    out: Path,
    variants: Sequence[Variant],
    settings: Settings,
    *,
    kind: str,
    folds: str = "1",
    devices: Devices = ANY,
    cluster: ClusterOptions = HERE,
    console: Console | None = None,
) -> Table:
    """Run every fold of every variant into OUT/VARIANT/foldK, then write the table and plots to OUT/comparison.

    Finished runs are skipped. A failed run does not stop the others; its message is repeated at the end.
    """
    console = console or Console(stderr=True)
    dataset, out = Path(dataset).resolve(), Path(out).resolve()
    data = Dataset.open(dataset)
    chosen = check_folds(data, folds)
    todo = []
    for variant in variants:
        own = variant.settings(settings)
        check_settings(own)
        todo += [Run(f"{variant.folder}/fold{fold}", fold, own, variant.name) for fold in chosen]
    study = Study(out, kind, dataset, tuple(todo))
    failed = execute(study, todo, devices, cluster, console)
    for variant in variants:
        summarise(data, out / variant.folder)
    require_none(failed, len(todo))
    rows = [_read(out, variant) for variant in variants]
    shutil.rmtree(out / TABLE, ignore_errors=True)  # rebuilt on every call
    table = compare(rows, out / TABLE, against=rows[-1].name)
    figures.save(figures.variants(rows), out / TABLE, "study")
    return table


def _read(out: Path, variant: Variant) -> tables.Run:
    path = out / variant.folder
    if not (path / EVALUATION).is_file():
        raise PclmixError(f"{path} has no scores: the test cases of the folds need dense masks in referenceTr")
    return tables.Run(variant.name, read_summary(path / EVALUATION))


def _terms(*, ctr: bool, het: bool, mix: bool) -> tuple[str, ...]:
    """Overrides that turn terms off; the other terms keep the weights of the recipe."""
    weights = {"params.lambda_ctr": ctr, "params.lambda_het": het, "params.lambda_mix": mix}
    return tuple(f"{key}=0" for key, kept in weights.items() if not kept)


#: The ablation table of the paper, in its order.
ABLATION = (
    Variant("sup", "1-sup", _terms(ctr=False, het=False, mix=False)),
    Variant("sup + ctr", "2-sup-ctr", _terms(ctr=True, het=False, mix=False)),
    Variant("sup + het", "3-sup-het", _terms(ctr=False, het=True, mix=False)),
    Variant("sup + het + mix", "4-sup-het-mix", _terms(ctr=False, het=True, mix=True)),
    Variant("sup + ctr + het", "5-sup-ctr-het", _terms(ctr=True, het=True, mix=False)),
    Variant("all, without pCE on Ft", "6-all-without-pce-on-ft", ("params.supervise_t=false",)),
    Variant("all", "7-all", ()),
)


def sweep_variants(grid: Sequence[str]) -> list[Variant]:
    """Every combination of `key=v1,v2,...`; keys with one value are set for all and do not appear in names.

    The key `method` takes names of methods, to compare methods in one study.

    >>> [v.name for v in sweep_variants(["params.lambda_t=0.1,0.2", "seed=3"])]
    ['lambda_t=0.1', 'lambda_t=0.2']
    """
    axes = []
    for text in grid:
        key, sign, values = text.partition("=")
        choices = [v.strip() for v in values.split(",") if v.strip()]
        if not sign or not key or not choices:
            raise PclmixError(f"'{text}' is not of the form key=v1,v2,..., such as params.lambda_t=0.1,0.2,0.3")
        if len(set(choices)) != len(choices):
            raise PclmixError(f"'{text}' names a value twice")
        axes.append([(key, value) for value in choices])
    varied = {axis[0][0] for axis in axes if len(axis) > 1}
    if not varied:
        raise PclmixError("nothing varies; give at least one key several values, such as params.lambda_t=0.1,0.2,0.3")
    variants = []
    for chosen in product(*axes):
        name = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen if key in varied)
        folder = "_".join(f"{key}={value}" for key, value in chosen).replace("/", "-")
        method = next((value for key, value in chosen if key == METHOD), None)
        variants.append(
            Variant(name, folder, tuple(f"{key}={value}" for key, value in chosen if key != METHOD), method)
        )
    return variants
