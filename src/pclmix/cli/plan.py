"""`pclmix plan`: settings from the data."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from pclmix.cli import app, options


@app.command(epilog="Example: pclmix plan data --minutes 10 --out plan.yaml")
def plan(
    dataset: options.Dataset,
    out: Annotated[Path | None, typer.Option(help="The file to write.", show_default="print it")] = None,
    minutes: Annotated[float, typer.Option(help="Minutes to train for.")] = 5.0,
    device: options.Device = "auto",
    fold: Annotated[int | None, typer.Option(help="Leave out the test cases of this fold, counted from 1.")] = None,
) -> None:
    """Choose settings from the data: size, patches, intensities, network, batch and steps, each with its reason.

    The plan is a recipe to read and to change; `pclmix train DATASET --out RUN --recipe plan.yaml` takes it. The same
    dataset, device and minutes give the same plan. Nothing is trained or timed.
    """
    from pclmix.data.dataset import Dataset
    from pclmix.errors import PclmixError
    from pclmix.io.files import atomic_path, require_new_file
    from pclmix.training.auto import plan_dataset
    from pclmix.training.plan import training_cases

    if out is not None:
        if out.suffix not in (".yaml", ".yml"):
            raise PclmixError(f"--out {out}: a plan is a recipe, whose name ends in .yaml")
        require_new_file(out)
    opened = Dataset.open(dataset)
    made = plan_dataset(opened, training_cases(opened, fold), device=device, minutes=minutes, show=True)
    for note in made.notes:
        typer.echo(note, err=True)
    if out is None:
        typer.echo(made.text, nl=False)
        return
    with atomic_path(out) as temporary:
        temporary.write_text(made.text, encoding="utf-8")
    typer.echo(f"{out}: about {made.steps} steps of PCLMix in {minutes:g} minutes")
    typer.echo(f"next: pclmix train {quote(str(dataset))} --out RUN --recipe {quote(str(out))}")
