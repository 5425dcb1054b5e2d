"""`pclmix train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pclmix.cli import app

_EXAMPLE = "Example: pclmix train DATASET --out run1 --recipe fast --fold 1 optim.lr=0.01"


@app.command(epilog=_EXAMPLE)
def train(
    dataset: Annotated[Path, typer.Argument(help="A dataset folder (dataset.json, imagesTr, labelsTr).")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.")] = None,
    out: Annotated[Path, typer.Option(help="The run folder to make.")] = ...,  # type: ignore[assignment]
    method: Annotated[str | None, typer.Option(help="A name of `pclmix methods`.", show_default="pclmix")] = None,
    recipe: Annotated[str | None, typer.Option(help="paper, fast, tiny or a .yaml file.", show_default="fast")] = None,
    fold: Annotated[int | None, typer.Option(help="Leave out the test cases of this fold, counted from 1.")] = None,
    iterations: Annotated[int | None, typer.Option(help="Number of steps.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Train for this long instead; not bit-exact on resume.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    devices: Annotated[int, typer.Option(help="Devices on each node.")] = 1,
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint, or start.")] = False,
) -> None:
    """Train a method on the scribbles of a dataset.

    Without --fold all training cases are used. The dataset is checked first; a run folder that exists is refused
    unless --resume is given. Ctrl-C saves and says how to go on.
    """
    from pclmix.engine.start import run_training

    given = {"engine.iterations": iterations, "engine.seconds": seconds, "seed": seed}
    extra = [f"{key}={value}" for key, value in given.items() if value is not None]
    finished = run_training(
        dataset,
        out,
        method=method,
        recipe=recipe,
        overrides=[*extra, *(overrides or [])],
        fold=fold,
        resume=resume,
        device=device,
        devices=devices,
        nodes=nodes,
    )
    if not finished:
        raise typer.Exit(130)
