"""`pclmix ablate` and `pclmix sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pclmix.cli import app

if TYPE_CHECKING:
    from pclmix.report.study import Variant

_Dataset = Annotated[Path, typer.Argument(help="A dataset folder with folds in splits_final.json.")]
_Folds = Annotated[str, typer.Option(help="Such as 1, 1-5 or all.")]
_Method = Annotated[str | None, typer.Option(help="A name of `pclmix methods`.", show_default="pclmix")]
_Recipe = Annotated[str | None, typer.Option(help="paper, fast, tiny or a .yaml file.", show_default="fast")]
_Iterations = Annotated[int | None, typer.Option(help="Number of steps of each run.")]
_Seed = Annotated[int | None, typer.Option(help="Seed of everything random, the same for each run.")]
_Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
_Jobs = Annotated[int, typer.Option(help="Runs at a time.", min=1)]


@app.command(epilog="Example: pclmix ablate data/acdc --out ablation --folds 1 --recipe fast")
def ablate(
    dataset: _Dataset,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of all.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the runs.")] = Path("ablation"),
    folds: _Folds = "1",
    recipe: _Recipe = None,
    iterations: _Iterations = None,
    seed: _Seed = None,
    device: _Device = "auto",
    jobs: _Jobs = 1,
) -> None:
    """The paper's ablation of PCLMix: its terms on and off, and without pCE on the transformer decoder.

    The same command again goes on where it stopped. DIR/comparison gets the table and plots.
    """
    from pclmix.report.study import ABLATION

    _run(dataset, out, ABLATION, folds, "pclmix", recipe, _with(overrides, iterations, seed), device, jobs)


@app.command(epilog="Example: pclmix sweep data/acdc params.lambda_t=0.1,0.2,0.3,0.4,0.5 --out sweep --folds 1")
def sweep(
    dataset: _Dataset,
    grid: Annotated[list[str], typer.Argument(metavar="KEY=V1,V2,...", help="Each key with the values to try.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the runs.")] = Path("sweep"),
    folds: _Folds = "1",
    method: _Method = None,
    recipe: _Recipe = None,
    iterations: _Iterations = None,
    seed: _Seed = None,
    device: _Device = "auto",
    jobs: _Jobs = 1,
) -> None:
    """Train with every combination of some settings; a key with one value is fixed for all.

    The same command again goes on where it stopped. DIR/comparison gets the table and plots.
    """
    from pclmix.report.study import sweep_variants

    variants = sweep_variants(grid)
    _run(dataset, out, variants, folds, method, recipe, _with(None, iterations, seed), device, jobs)


def _with(overrides: Sequence[str] | None, iterations: int | None, seed: int | None) -> list[str]:
    given = {"engine.iterations": iterations, "seed": seed}
    return [*(f"{key}={value}" for key, value in given.items() if value is not None), *(overrides or [])]


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
