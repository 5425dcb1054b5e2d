"""`pclmix train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pclmix.cli import app, options

_EXAMPLE = "Example: pclmix train DATASET --out run1 --recipe fast --fold 1 optim.lr=0.01"


@app.command(epilog=_EXAMPLE)
def train(
    dataset: options.TrainingDataset,
    overrides: options.Overrides = None,
    out: Annotated[Path, typer.Option(help="The run folder to make.")] = ...,  # type: ignore[assignment]
    method: options.Method = None,
    recipe: options.Recipe = None,
    fold: Annotated[int | None, typer.Option(help="Leave out the test cases of this fold, counted from 1.")] = None,
    iterations: options.Iterations = None,
    seconds: Annotated[float | None, typer.Option(help="Train for this long instead; not bit-exact on resume.")] = None,
    seed: options.Seed = None,
    device: options.Device = "auto",
    devices: Annotated[int, typer.Option(help="Devices on each node.")] = 1,
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint, or start.")] = False,
) -> None:
    """Train a method on the scribbles of a dataset.

    Without --fold all training cases are used. The dataset is checked first; a run folder that exists is refused
    unless --resume is given. Ctrl-C saves and says how to go on.
    """
    from pclmix.engine.start import run_training

    finished = run_training(
        dataset,
        out,
        method=method,
        recipe=recipe,
        overrides=options.settings(overrides, iterations=iterations, seconds=seconds, seed=seed),
        fold=fold,
        resume=resume,
        device=device,
        devices=devices,
        nodes=nodes,
    )
    if not finished:
        raise typer.Exit(130)
