"""Studies: the paper's ablation and sensitivity tables. Each variant is a cross-validation, so each part resumes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from pclmix.config import load_config
from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.evaluate import read_summary
from pclmix.files import require_writable
from pclmix.labels import palette
from pclmix.methods.base import build_params, find_method
from pclmix.report import figures
from pclmix.report.compare import compare
from pclmix.report.crossval import EVALUATION, parse_folds
from pclmix.report.runs import Run
from pclmix.report.tables import Table

TABLE = "comparison"


@dataclass(frozen=True)
class Variant:
    """One row: its name in the table, its folder, and the settings that make it."""

    name: str
    folder: str
    overrides: tuple[str, ...]


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
        variants.append(Variant(name, folder, tuple(f"{key}={value}" for key, value in chosen)))
    return variants


def run_study(
    dataset: Path,
    out: Path,
    variants: Sequence[Variant],
    *,
    folds: str = "1",
    method: str | None = None,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    device: str = "auto",
    jobs: int = 1,
    console: Console | None = None,
) -> Table:
    """Run every variant into OUT/FOLDER, `jobs` at a time, then write the table and plots to OUT/comparison.

    What is done is not done again. A variant that fails does not stop the others; its message is repeated at the end.
    """
    console = console or Console(stderr=True)
    out = Path(out)
    parse_folds(folds, len(Dataset.open(dataset).splits()))
    for variant in variants:  # a misspelt key should fail now, not after the first hours
        config = load_config(recipe or "fast", method, (*overrides, *variant.overrides))
        build_params(find_method(config.method), config.params)
    if out.is_file():
        raise PclmixError(f"{out} is a file; --out is the folder for the runs")
    require_writable(out)
    given = {"--folds": folds, "--method": method, "--recipe": recipe, "--device": device}
    options = [text for key, value in given.items() if value is not None for text in (key, value)]
    shared = [sys.executable, "-m", "pclmix", "crossval", str(dataset), *options]

    def run(variant: Variant) -> str:
        if (out / variant.folder / EVALUATION).is_file():
            console.print(f"{variant.name}: done already", highlight=False)
            return ""
        console.print(f"{variant.name}: started", highlight=False)
        command = [*shared, "--out", str(out / variant.folder), *overrides, *variant.overrides]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(jobs), errors="replace")
        console.print(f"{variant.name}: {'done' if done.returncode == 0 else 'failed'}", highlight=False)
        return "" if done.returncode == 0 else f"{variant.name}: {_last_line(done.stderr)}"

    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        failures = [message for message in pool.map(run, variants) if message]
    if failures:
        raise PclmixError("not every variant finished; the same command goes on. " + "; ".join(failures))
    runs = [_read(out, variant) for variant in variants]
    shutil.rmtree(out / TABLE, ignore_errors=True)  # made anew from its rows; it is never the only copy of anything
    table = compare(runs, out / TABLE, against=runs[-1].name)
    figures.save(lines(runs), out / TABLE, "study")
    return table


def _environment(jobs: int) -> dict[str, str]:
    """Several jobs share the cores; threads of one that spin would starve the others."""
    threads = max(1, (os.cpu_count() or 1) // max(1, jobs))
    return {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"


def _read(out: Path, variant: Variant) -> Run:
    path = out / variant.folder
    if not (path / EVALUATION).is_file():
        raise PclmixError(f"{path} has no scores: the test cases of the folds need dense masks in referenceTr")
    return Run(variant.name, read_summary(path / EVALUATION))


def lines(runs: Sequence[Run]) -> Any:
    """Mean Dice and HD95 of every class and of all, over the variants in their order."""
    from matplotlib.figure import Figure

    names = runs[0].summary.names
    figure = Figure(figsize=(2.5 + 1.3 * len(runs), 6.2), layout="constrained")
    panels: Any = figure.subplots(2, 1, sharex=True)
    for axis, measure, scale, title in (
        (panels[0], "Dice", 100.0, "Dice (%), higher is better"),
        (panels[1], "HD95_50", 1.0, "HD95 (mm), lower is better"),
    ):
        for name, colour in zip(names, palette(len(names) + 1)[1:], strict=True):
            values = [scale * run.summary.of_class(name, measure).mean for run in runs]
            axis.plot(values, "o-", color=colour, label=name, linewidth=1.2, markersize=4)
        means = [scale * run.summary.mean(measure).mean for run in runs]
        axis.plot(means, "s-", color="#222222", label="mean", linewidth=2.2)
        axis.set_title(title, fontsize=10, loc="left")
        axis.grid(alpha=0.3)
    panels[1].set_yscale("log")
    panels[1].set_xticks(range(len(runs)), [run.name for run in runs], rotation=20, ha="right", fontsize=9)
    panels[0].legend(frameon=False, fontsize=9, ncols=len(names) + 1)
    return figure
