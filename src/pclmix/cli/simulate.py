"""Commands that make data: a phantom out of nothing, weak labels out of dense masks."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
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
    from rich.console import Console
    from rich.progress import Progress

    from pclmix.data.phantom import make_phantom

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("making cases", total=2 * cases)
        names = make_phantom(out, cases, seed, progress=lambda _: bar.advance(task))
    typer.echo(f"{out}: {len(names)} cases of {cases} patients; next: pclmix check {quote(str(out))}")


@app.command(epilog="Example: pclmix scribble masks scribbles --amount 0.5 --seed 1")
def scribble(
    masks: Annotated[
        Path, typer.Argument(metavar="MASKS", help="A folder of dense label files, or a dataset with dense masks.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; must not exist.")],
    kind: Annotated[
        str, typer.Option(help="scribble; points: one a region, five of background; box: its outline as background.")
    ] = "scribble",
    amount: Annotated[float, typer.Option(help="How much is drawn; 1 is about what the ACDC experts drew.")] = 1.0,
    width: Annotated[int, typer.Option(help="Strokes are 1 to this many pixels wide, at random.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same strokes.")] = 0,
) -> None:
    """Draw weak labels from dense masks, as a person would: for each slice and class, background included.

    MASKS is a dataset (dense masks in referenceTr; or in labelsTr, where its labels have no 'ignore'): OUT becomes a
    complete dataset with the same images and folds, the drawn labels in labelsTr, the dense masks in referenceTr.

    MASKS is a folder of label files (below it, files named NAME_gt, _mask, _label or _seg where there are such, else
    all): OUT holds one label file each, with the highest value plus one where nothing is drawn. With the images,
    `pclmix import folder IMAGES DATASET --scribbles OUT --masks MASKS` then makes the dataset.
    """
    from pclmix.data.scribble import Style
    from pclmix.data.weaken import weaken

    count, following = weaken(masks, out, Style(kind, amount, width), seed, show=True)
    typer.echo(f"{out}: {count} cases, {following}")
