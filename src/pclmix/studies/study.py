"""A study of several variants, all compared in one table; the ablation of the paper and grids of settings."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
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
METHOD = "method"  #: the key of a grid that takes names of methods


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
    study = Study(out, kind, dataset, tuple(todo))
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


def _terms(*, ctr: bool, het: bool, mix: bool) -> tuple[str, ...]:
    """Overrides that turn terms off; a term that stays is not mentioned, so that recipes keep their weights."""
    weights = {"params.lambda_ctr": ctr, "params.lambda_het": het, "params.lambda_mix": mix}
    return tuple(f"{key}=0" for key, kept in weights.items() if not kept)


#: The paper's second table, in its order.
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
    """Every combination of `key=v1,v2,...`; a key with one value is set for all and is in no name.

    The key `method` takes names of methods, so that a table of methods is one study.

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
