"""`pclmix ablate` and `pclmix sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pclmix.cli import app, options

if TYPE_CHECKING:
    from pclmix.report.study import Variant

_Folds = Annotated[str, typer.Option(help="Such as 1, 1-5 or all.")]
_Jobs = Annotated[int, typer.Option(help="Runs at a time.", min=1)]


@app.command(epilog="Example: pclmix ablate data/acdc --out ablation --folds 1 --recipe fast")
def ablate(
    dataset: options.DatasetWithFolds,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of all.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the runs.")] = Path("ablation"),
    folds: _Folds = "1",
    recipe: options.Recipe = None,
    iterations: options.IterationsOfEach = None,
    seed: options.SeedOfEach = None,
    device: options.Device = "auto",
    jobs: _Jobs = 1,
) -> None:
    """The paper's ablation of PCLMix: its terms on and off, and without pCE on the transformer decoder.

    The same command again goes on where it stopped. DIR/comparison gets the table and plots.
    """
    from pclmix.report.study import ABLATION

    _run(
        dataset,
        out,
        ABLATION,
        folds,
        "pclmix",
        recipe,
        options.settings(overrides, iterations=iterations, seed=seed),
        device,
        jobs,
    )


@app.command(epilog="Example: pclmix sweep data/acdc params.lambda_t=0.1,0.2,0.3,0.4,0.5 --out sweep --folds 1")
def sweep(
    dataset: options.DatasetWithFolds,
    grid: Annotated[list[str], typer.Argument(metavar="KEY=V1,V2,...", help="Each key with the values to try.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the runs.")] = Path("sweep"),
    folds: _Folds = "1",
    method: options.Method = None,
    recipe: options.Recipe = None,
    iterations: options.IterationsOfEach = None,
    seed: options.SeedOfEach = None,
    device: options.Device = "auto",
    jobs: _Jobs = 1,
) -> None:
    """Train with every combination of some settings; a key with one value is fixed for all.

    The same command again goes on where it stopped. DIR/comparison gets the table and plots.
    """
    from pclmix.report.study import sweep_variants

    variants = sweep_variants(grid)
    _run(
        dataset,
        out,
        variants,
        folds,
        method,
        recipe,
        options.settings(None, iterations=iterations, seed=seed),
        device,
        jobs,
    )


def _run(
    dataset: Path,
    out: Path,
    variants: Sequence[Variant],
    folds: str,
    method: str | None,
    recipe: str | None,
    overrides: Sequence[str],
    device: str,
    jobs: int,
) -> None:
    from pclmix.report.study import TABLE, run_study
    from pclmix.report.tables import markdown

    table = run_study(
        dataset,
        out,
        variants,
        folds=folds,
        method=method,
        recipe=recipe,
        overrides=overrides,
        device=device,
        jobs=jobs,
    )
    typer.echo(markdown(table))
    typer.echo(f"written: {out / TABLE}")
