"""Commands that make data: a phantom out of nothing, weak labels out of dense masks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pclmix.cli import app


@app.command(epilog="Example: pclmix phantom data/phantom --cases 12 --seed 0")
def phantom(
    out: Annotated[Path, typer.Argument(help="The dataset folder to write; must not exist.", show_default=False)],
    cases: Annotated[int, typer.Option(min=1, max=999, help="Patients, two frames each.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same set.")] = 0,
) -> None:
    """Make a cardiac-like dataset: images, simulated scribbles, dense masks, folds by patient.

    Cases are named phantomXXX_frame01 (relaxed) and phantomXXX_frame02 (contracted); the classes are RV, Myo, LV.
    """
    from rich.progress import Progress

    from pclmix.data.phantom import make_phantom

    with Progress(transient=True) as bar:
        task = bar.add_task("making cases", total=2 * cases)
        names = make_phantom(out, cases, seed, progress=lambda _: bar.advance(task))
    typer.echo(f"{out}: {len(names)} cases of {cases} patients. Next: pclmix check {out}")
