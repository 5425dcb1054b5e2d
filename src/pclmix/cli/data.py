"""Commands that make, check and split datasets."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from pclmix.cli import app, options

if TYPE_CHECKING:
    from pclmix.data.findings import Report


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
    if len(made.splits()) == 1:
        note = "all cases fall into one fold, which leaves none to train on; `pclmix split --folds N` makes others"
        typer.echo(f"note: {note}", err=True)
    references = sum(made.has_reference(case) for case in made.cases)
    typer.echo(f"{dataset}: {len(made.cases)} cases, {references} with a dense mask, {len(made.splits())} folds")
    typer.echo(f"next: pclmix check {quote(str(dataset))}")


@app.command("check", epilog="Example: pclmix check acdc --json > check.json")
def check_(
    dataset: options.DatasetFolder,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, for programs.")] = False,
) -> None:
    """Read every file of a dataset and say what is wrong with it: exit code 0 with warnings alone, 2 with errors."""
    from pclmix.data.check import check_folder
    from pclmix.errors import PclmixError

    report = check_folder(dataset, show=not json)
    if json:
        import json as writer

        typer.echo(writer.dumps(report.to_json(), indent=2))
        raise typer.Exit(2 if report.errors else 0)
    if report.cases:
        _show_report(report)
    if report.errors:
        raise PclmixError(report.refusal())


def _show_report(report: Report) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    classes = Table("class", "pixels drawn", "of all pixels", "cases with a stroke", box=box.SIMPLE)
    for share in report.classes:
        classes.add_row(share.name, str(share.pixels), f"{share.share:.3%}", f"{share.cases} of {report.cases}")
    console.print(classes)
    if report.findings:
        findings = Table("", "case", "finding", box=box.SIMPLE)
        for finding in report.findings:
            colour = "red" if finding.level == "error" else "yellow"
            message = finding.message.replace(f"{report.dataset}/", "")
            findings.add_row(f"[{colour}]{finding.level}[/]", escape(finding.case), escape(message))
        console.print(findings)
    console.print(
        f"{report.cases} cases, {report.references} with a dense mask: "
        f"{len(report.errors)} errors, {len(report.warnings)} warnings",
        soft_wrap=True,
    )


@app.command("split", epilog="Example: pclmix split acdc --folds 4 --seed 1 --kind patient")
def split_(
    dataset: options.DatasetFolder,
    folds: Annotated[
        int | None, typer.Option(min=1, help="How many; default 5, or fewer where patients are few.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Shuffle the patients; without it they stay in order.")
    ] = None,
    kind: Annotated[str, typer.Option(help="patient, or acdc: twenty consecutive patient numbers a fold.")] = "patient",
) -> None:
    """Write other folds, by patient, to splits_final.json; the ones before are kept as splits_previous.json."""
    from pclmix.data.dataset import Dataset, replace_splits
    from pclmix.data.splits import make_splits

    opened = Dataset.open(dataset)
    splits = make_splits(opened.cases, kind=kind, count=folds, seed=seed, pattern=opened.patient_pattern)
    replace_splits(dataset, splits)
    for number, split in enumerate(splits, start=1):
        typer.echo(f"fold {number}: {len(split.train)} cases to train on, {len(split.test)} to test")
