"""A study of several variants: each trained on the folds asked for, all compared in one table."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from pclmix.cluster.engine import HERE, ClusterOptions
from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.metrics import read_summary
from pclmix.report import figures, runs
from pclmix.report.compare import compare
from pclmix.report.tables import Table
from pclmix.studies.crossval import check_folds, check_settings, require_none, summarise
from pclmix.studies.execute import ANY, Devices, execute
from pclmix.studies.plan import EVALUATION, Run, Settings, Study

TABLE = "comparison"


@dataclass(frozen=True)
class Variant:
    """One row: its name in the table, its folder, and the settings that make it."""

    name: str
    folder: str
    overrides: tuple[str, ...]
    method: str | None = None  #: where it is not that of the study

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

    Finished runs are skipped. A run that fails does not stop the others; its message is repeated at the end.
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
    study = Study(out, kind, dataset, tuple(todo)).begin()
    failed = execute(study, todo, devices, cluster, console)
    for variant in variants:
        summarise(data, out / variant.folder)
    require_none(failed, len(todo))
    rows = [_read(out, variant) for variant in variants]
    shutil.rmtree(out / TABLE, ignore_errors=True)  # rebuilt from the runs on every call
    table = compare(rows, out / TABLE, against=rows[-1].name)
    figures.save(figures.variants(rows), out / TABLE, "study")
    return table


def _read(out: Path, variant: Variant) -> runs.Run:
    path = out / variant.folder
    if not (path / EVALUATION).is_file():
        raise PclmixError(f"{path} has no scores: the test cases of the folds need dense masks in referenceTr")
    return runs.Run(variant.name, read_summary(path / EVALUATION))
