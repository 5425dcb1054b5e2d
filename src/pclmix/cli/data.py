"""Commands that make, check and split datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pclmix.cli import app

DatasetFolder = Annotated[Path, typer.Argument(metavar="DATASET", help="A dataset folder, with dataset.json in it.")]


@app.command("import", epilog="Example: pclmix import acdc ACDC/database acdc --scribbles ACDC_scribbles")
def import_(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="acdc, wsl4mis or folder.")],
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The folder to read.")],
    dataset: Annotated[Path, typer.Argument(metavar="DATASET", help="The dataset folder to write.")],
    scribbles: Annotated[Path | None, typer.Option(help="Scribbles in another folder.")] = None,
    masks: Annotated[Path | None, typer.Option(help="Dense masks in another folder.")] = None,
    nifti: Annotated[Path | None, typer.Option(help="wsl4mis: the original NIfTI files, for the spacing.")] = None,
    classes: Annotated[
        str, typer.Option(help="folder: class names, background first, as NAME,NAME or NAME=VALUE,NAME=VALUE.")
    ] = "",
    ignore: Annotated[
        int | None, typer.Option(min=-32768, max=65535, help="The value that means 'nothing drawn'.")
    ] = None,
) -> None:
    """Write a dataset from images and scribbles in another layout; nothing of an image is changed."""
    from pclmix.data.importers import Options, import_dataset

    names = tuple(part for part in classes.split(",") if part.strip())
    options = Options(scribbles=scribbles, masks=masks, nifti=nifti, classes=names, ignore=ignore)
    made, notes = import_dataset(kind, source, dataset, options, show=True)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    references = sum(made.has_reference(case) for case in made.cases)
    typer.echo(f"{dataset}: {len(made.cases)} cases, {references} with a dense mask, {len(made.splits())} folds")
    typer.echo(f"next: pclmix check {dataset}")
