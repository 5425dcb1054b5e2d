"""`pclmix compare`: several runs in one table."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pclmix.cli import app


class Empty(StrEnum):
    fifty = "50"
    nan = "nan"


@app.command(epilog="Example: pclmix compare PCLMix=runs/pclmix pCE=runs/pce --out cmp --against PCLMix --dataset data")
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Run folders, JSON or CSV of `pclmix evaluate`, nnU-Net's summary.json, or folders of predictions "
            "(with --reference); each as PATH or NAME=PATH.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write; it must not exist.")],
    against: Annotated[
        str | None, typer.Option(metavar="NAME", help="Test against this row; the first if not.")
    ] = None,
    reference: Annotated[Path | None, typer.Option(help="Dense masks or a dataset, to score predictions with.")] = None,
    fold: Annotated[int | None, typer.Option(help="Score the test cases of this fold of --reference.")] = None,
    dataset: Annotated[Path | None, typer.Option(help="Draw the median case with images of this dataset.")] = None,
    median_of: Annotated[
        str | None, typer.Option("--median-of", metavar="NAME", help="Whose median case; that of --against if not.")
    ] = None,
    empty: Annotated[Empty, typer.Option(help="HD95 of an empty prediction: 50 mm, or left out.")] = Empty.fifty,
    unranked: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Never best or second, as an upper bound; repeatable.")
    ] = None,
) -> None:
    """A table as in papers (Markdown, CSV, LaTeX, HTML), box plots per class and a qualitative figure."""
    from rich.console import Console
    from rich.progress import Progress

    from pclmix.files import refuse_existing, require_writable
    from pclmix.report import tables
    from pclmix.report.compare import compare as compare_runs
    from pclmix.report.runs import read_runs

    refuse_existing(out)
    require_writable(out)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading runs", total=None)
        read = read_runs(
            runs, reference, fold=fold, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
        table = compare_runs(
            read,
            out,
            against=against,
            dataset=dataset,
            median_of=median_of,
            empty="50" if empty is Empty.fifty else "nan",
            unranked=tuple(unranked or ()),
        )
    typer.echo(tables.markdown(table))
    typer.echo(f"written: {out}/report.html and table.md, table.csv, table.tex, compare.json, figures")
