"""`pclmix crossval`: every fold trained, predicted and evaluated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pclmix.cli import app, options
from pclmix.cli.predict import Flips

if TYPE_CHECKING:
    from rich.console import Console

    from pclmix.evaluate import Summary


@app.command(epilog="Example: pclmix crossval data/acdc --out cv --folds 1-5 --recipe fast")
def crossval(
    dataset: options.DatasetWithFolds,
    overrides: options.Overrides = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder that gets fold1, fold2, ...")] = Path("crossval"),
    folds: Annotated[str, typer.Option(help="Such as 1-5, 1,3 or all.")] = "all",
    method: options.Method = None,
    recipe: options.Recipe = None,
    iterations: options.Iterations = None,
    seconds: Annotated[float | None, typer.Option(help="Train each fold for this long instead.")] = None,
    seed: options.Seed = None,
    device: options.Device = "auto",
    devices: Annotated[int, typer.Option(help="Devices to train each fold on.")] = 1,
    tta: Annotated[Flips, typer.Option(help="Average predictions over flipped copies.")] = Flips.none,
    largest_component: options.LargestComponent = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="As with train; the same command goes on without it, too.")
    ] = False,
) -> None:
    """Train, predict and evaluate each fold, then one summary over all cases.

    The same command again goes on where it stopped: a fold that is done is skipped, an interrupted one resumes.
    DIR/foldK is a run folder with predictions, evaluation.json and cases.csv; DIR has both files over all folds.
    """
    from rich.console import Console

    from pclmix.cli.evaluate import print_summary
    from pclmix.report.crossval import cross_validate

    result = cross_validate(
        dataset,
        out,
        folds=folds,
        method=method,
        recipe=recipe,
        overrides=options.settings(overrides, iterations=iterations, seconds=seconds, seed=seed),
        device=device,
        devices=devices,
        tta="flip" if tta is Flips.flip else "none",
        largest_component=largest_component,
    )
    if result is None:
        typer.echo("stopped and saved. The same command goes on.", err=True)
        raise typer.Exit(130)
    console = Console()
    if result.summary is not None:
        _print_folds(console, result.folds)
        print_summary(console, result.summary)
    typer.echo(f"written: {out}")


def _print_folds(console: Console, folds: dict[int, Summary]) -> None:
    from rich.table import Table

    table = Table(title="folds, mean over classes and cases")
    table.add_column("fold")
    for heading in ("cases", "Dice %", "HD95 mm", "empty = 50"):
        table.add_column(heading, justify="right")
    for fold, summary in folds.items():
        scaled = [scale * summary.mean(m).mean for m, scale in (("Dice", 100), ("HD95", 1), ("HD95_50", 1))]
        cells = ("-" if math.isnan(value) else f"{value:.1f}" for value in scaled)
        table.add_row(str(fold), str(len(summary.cases)), *cells)
    console.print(table)
