"""Commands that train several times: `crossval`, `ablate`, `sweep` and `demo`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pclmix.cli import app, options

if TYPE_CHECKING:
    from rich.console import Console

    from pclmix.cluster.engine import ClusterOptions
    from pclmix.metrics import Summary
    from pclmix.studies.plan import Settings
    from pclmix.studies.study import Variant

_Out = Annotated[Path, typer.Option(metavar="DIR", help="The folder for the runs.")]


@app.command(epilog="Example: pclmix crossval data/acdc --out cv --folds 1-5 --recipe fast")
def crossval(
    dataset: options.Dataset,
    overrides: options.Overrides = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for fold1, fold2, ...")] = Path("crossval"),
    folds: options.Folds = "all",
    method: options.Method = None,
    recipe: options.StudyRecipe = "fast",
    iterations: options.Iterations = None,
    seconds: options.Seconds = None,
    seed: options.Seed = None,
    device: options.Device = "auto",
    devices: options.Devices = 1,
    tta: options.TTA = "none",
    largest_component: options.LargestComponent = False,
    cluster: options.Cluster = None,
    cores: options.Cores = None,
    gpus: options.Gpus = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Accepted as in train; the command continues without it as well.")
    ] = False,
) -> None:
    """Train, predict and evaluate each fold, then summarise all cases.

    The same command continues where it stopped: finished folds are skipped, an interrupted one resumes. DIR/foldK is a
    run folder with predictions, evaluation.json and cases.csv; DIR has both files over all folds.
    """
    from rich.console import Console

    from pclmix.cli.predict import print_summary
    from pclmix.cluster.engine import ClusterOptions
    from pclmix.studies.execute import Devices
    from pclmix.studies.plan import Settings
    from pclmix.studies.study import cross_validate

    given = options.settings(overrides, iterations=iterations, seconds=seconds, seed=seed)
    result = cross_validate(
        dataset,
        out,
        Settings(method, recipe, tuple(given), tta, largest_component),
        folds=folds,
        devices=Devices(device, devices),
        cluster=ClusterOptions(cluster, cores, gpus),
    )
    console = Console()
    if result.summary is not None:
        _print_folds(console, result.folds)
        print_summary(console, result.summary)
    typer.echo(f"written: {out}")


def _print_folds(console: Console, folds: dict[int, Summary]) -> None:
    from rich.table import Table

    table = Table(title="folds, mean over classes and cases")
    table.add_column("fold")
    unit = next(iter(folds.values())).unit
    for heading in ("cases", "Dice %", f"HD95 {unit}", "empty = 50"):
        table.add_column(heading, justify="right")
    for fold, summary in folds.items():
        scaled = [scale * summary.mean(m).mean for m, scale in (("Dice", 100), ("HD95", 1), ("HD95_50", 1))]
        cells = ("-" if math.isnan(value) else f"{value:.1f}" for value in scaled)
        table.add_row(str(fold), str(len(summary.cases)), *cells)
    console.print(table)


@app.command(epilog="Example: pclmix ablate data/acdc --out ablation --folds 1 --recipe fast")
def ablate(
    dataset: options.Dataset,
    overrides: options.Overrides = None,
    out: _Out = Path("ablation"),
    folds: options.Folds = "1",
    recipe: options.StudyRecipe = "fast",
    iterations: options.Iterations = None,
    seed: options.Seed = None,
    device: options.Device = "auto",
    cluster: options.Cluster = None,
    cores: options.Cores = None,
    gpus: options.Gpus = None,
) -> None:
    """Train the paper's ablation of PCLMix: its terms on and off, and without pCE on the transformer decoder.

    The same command continues where it stopped. DIR/comparison gets the table and plots.
    """
    from pclmix.cluster.engine import ClusterOptions
    from pclmix.studies.plan import Settings
    from pclmix.studies.study import ABLATION

    settings = Settings("pclmix", recipe, tuple(options.settings(overrides, iterations=iterations, seed=seed)))
    _run("ablate", dataset, out, ABLATION, settings, folds, device, ClusterOptions(cluster, cores, gpus))


@app.command(epilog="Example: pclmix sweep data/acdc params.lambda_t=0.1,0.2,0.3,0.4,0.5 --out sweep --folds 1")
def sweep(
    dataset: options.Dataset,
    grid: Annotated[list[str], typer.Argument(metavar="KEY=V1,V2,...", help="Each key with the values to try.")],
    out: _Out = Path("sweep"),
    folds: options.Folds = "1",
    method: options.Method = None,
    recipe: options.StudyRecipe = "fast",
    iterations: options.Iterations = None,
    seed: options.Seed = None,
    device: options.Device = "auto",
    cluster: options.Cluster = None,
    cores: options.Cores = None,
    gpus: options.Gpus = None,
) -> None:
    """Train with every combination of some settings; a key with one value is the same for all.

    The key `method` compares methods: method=pclmix,pce,em seed=0,1,2.

    The same command continues where it stopped. DIR/comparison gets the table and plots.
    """
    from pclmix.cluster.engine import ClusterOptions
    from pclmix.errors import PclmixError
    from pclmix.studies.plan import Settings
    from pclmix.studies.study import METHOD, sweep_variants

    variants = sweep_variants(grid)
    if method is not None and any(variant.method for variant in variants):
        raise PclmixError(f"--method {method} and the key {METHOD} of the grid both name methods; leave one out")
    settings = Settings(method, recipe, tuple(options.settings(None, iterations=iterations, seed=seed)))
    _run("sweep", dataset, out, variants, settings, folds, device, ClusterOptions(cluster, cores, gpus))


def _run(
    kind: str,
    dataset: Path,
    out: Path,
    variants: Sequence[Variant],
    settings: Settings,
    folds: str,
    device: str,
    cluster: ClusterOptions,
) -> None:
    from pclmix.report.tables import markdown
    from pclmix.studies.execute import Devices
    from pclmix.studies.study import TABLE, run_study

    table = run_study(
        dataset, out, variants, settings, kind=kind, folds=folds, devices=Devices(device), cluster=cluster
    )
    typer.echo(markdown(table))
    typer.echo(f"written: {out / TABLE}")


@app.command(epilog="Example: pclmix status sweep")
def status(
    study: Annotated[Path, typer.Argument(metavar="STUDY", help="The --out folder of crossval, ablate or sweep.")],
) -> None:
    """Show how far a study is: its runs, the nodes they run on, steps and scores, and whether it is running."""
    from rich.console import Console

    from pclmix.studies.plan import read_study
    from pclmix.studies.status import read_states, render

    found = read_study(study)
    console = Console(highlight=False)
    states = read_states(found)
    console.print(render(states, f"{found.kind} {found.folder}"))
    for state in states:
        if state.reason:
            console.print(f"{state.run.name} {state.status}: {state.reason}", markup=False, soft_wrap=True)


@app.command(epilog="Example: pclmix demo --out demo --overwrite")
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make.")] = Path("demo"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo.")] = False,
    seed: options.MakerSeed = 0,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of training for each of the two methods.")] = 80.0,
) -> None:
    """Train PCLMix and partial cross-entropy on a phantom and compare them in one page.

    Both have the same scribbles, encoder, augmentation and seconds. Held-out patients are scored and shown in
    DIR/report.html, which opens offline; DIR/demo.json has the scores. Under four minutes on two cores.
    """
    from pclmix.studies.demo import REPORT, run_demo

    result = run_demo(out, seed=seed, seconds=seconds, overwrite=overwrite)
    typer.echo(result.verdict)
    typer.echo(f"report: {(out / REPORT).resolve()}")
