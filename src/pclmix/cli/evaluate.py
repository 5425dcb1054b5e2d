"""Commands that score: `evaluate` and `compare`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pclmix.cli import app, options

if TYPE_CHECKING:
    from rich.console import Console

    from pclmix.metrics import Statistic, Summary
    from pclmix.metrics.comparison import Interval


@app.command(epilog="Example: pclmix evaluate run/predictions data/acdc --fold 1 --out scores.json --csv scores.csv")
def evaluate(
    pred: Annotated[Path, typer.Argument(metavar="PRED", help="Predictions: a folder, one file or a run folder.")],
    ref: Annotated[Path, typer.Argument(metavar="REF", help="Dense masks: a dataset, a folder or one file.")],
    out: Annotated[Path | None, typer.Option(metavar="F.json", help="Write everything here as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="F.csv", help="Write one row per case and class here.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="OTHER", help="Other predictions (or their JSON or CSV): differences with intervals."),
    ] = None,
    fold: options.Fold = None,
    largest_component: options.LargestComponent = False,
    ignore_headers: Annotated[
        bool, typer.Option("--ignore-headers", help="Accept predictions whose header differs but whose shape does not.")
    ] = False,
) -> None:
    """Score predictions: Dice, HD95, ASSD and volumes per case and class.

    Files are matched by case name. An empty prediction of a present class has Dice 0 and no HD95; the column "no HD95"
    counts them, the column "empty = 50" gives them 50 mm. A class absent from both has no score.
    """
    from rich.console import Console

    from pclmix.errors import PclmixError
    from pclmix.io.files import require_new_file
    from pclmix.metrics import evaluate as evaluate_predictions

    for target in (out, csv):
        if target is not None:
            require_new_file(target)
    if out is not None and csv is not None and out.resolve() == csv.resolve():
        raise PclmixError(f"--out and --csv both name {out}; give them two names")
    with options.progress("scoring") as tell:
        summary = evaluate_predictions(
            pred,
            ref,
            fold=fold,
            against=against,
            largest_component=largest_component,
            ignore_headers=ignore_headers,
            progress=tell,
        )
    console = Console()
    print_summary(console, summary)
    if out is not None:
        summary.write_json(out)
        console.print(f"written: {out}", soft_wrap=True, highlight=False)
    if csv is not None:
        summary.write_csv(csv)
        console.print(f"written: {csv}", soft_wrap=True, highlight=False)
    if summary.missing:
        raise PclmixError(
            f"no prediction for {len(summary.missing)} of {len(summary.missing) + len(summary.cases)} cases: "
            f"{', '.join(summary.missing)}; the means above are without them"
        )


def print_summary(console: Console, summary: Summary) -> None:
    from rich.table import Table

    from pclmix.metrics.comparison import LEVEL
    from pclmix.metrics.functional import MEASURES
    from pclmix.metrics.summary import STATUSES

    count = len(summary.cases)
    table = Table(title=f"{count} case{'s' if count > 1 else ''}, mean (sd)")
    table.add_column("class")
    for heading in ("Dice %", f"HD95 {summary.unit}", "empty = 50", f"ASSD {summary.unit}", "no HD95"):
        table.add_column(heading, justify="right")
    for name in summary.names:
        row = {m: summary.of_class(name, m) for m in MEASURES}
        table.add_row(name, *(_cell(row[m], m) for m in MEASURES), str(row["HD95"].nan))
    table.add_section()
    row = {m: summary.mean(m) for m in MEASURES}
    table.add_row("all", *(_cell(row[m], m) for m in MEASURES), str(row["HD95"].nan), style="bold")
    console.print(table)
    for status in STATUSES[1:]:
        counts = {name: summary.statuses(name)[status] for name in summary.names}
        if any(counts.values()):
            listed = ", ".join(f"{name} {n}" for name, n in counts.items() if n)
            console.print(f"{status}: {listed}", highlight=False)
    if summary.against is not None:
        second = Table(title=f"difference to {summary.against.other}, {LEVEL:.0%} interval by patient")
        second.add_column("class")
        # Three columns fit a terminal; the JSON has all.
        for heading in ("Dice %", f"HD95 {summary.unit}", f"ASSD {summary.unit}"):
            second.add_column(heading, justify="right")
        for name, intervals in [*summary.against.classes.items(), ("all", summary.against.mean)]:
            second.add_row(name, *(_interval(intervals[m], m) for m in ("Dice", "HD95", "ASSD")))
        console.print(second)
    if summary.without_reference:
        count = len(summary.without_reference)
        console.print(f"{count} predictions have no reference and were not scored: {summary.without_reference[0]} ...")


def _cell(statistic: Statistic, measure: str) -> str:
    scale, digits = (100, 1) if measure == "Dice" else (1, 1 if measure != "ASSD" else 2)
    if math.isnan(statistic.mean):
        return "-"
    return f"{scale * statistic.mean:.{digits}f} ({scale * statistic.sd:.{digits}f})"


def _interval(interval: Interval, measure: str) -> str:
    scale = 100 if measure == "Dice" else 1
    if math.isnan(interval.difference):
        return "-"
    middle, low, high = (f"{scale * value:+.1f}" for value in (interval.difference, interval.low, interval.high))
    return middle if math.isnan(interval.low) else f"{middle} [{low}, {high}]"


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
        str | None, typer.Option(metavar="NAME", help="Test against this row.", show_default="the first")
    ] = None,
    reference: Annotated[Path | None, typer.Option(help="Dense masks or a dataset, to score predictions with.")] = None,
    fold: Annotated[int | None, typer.Option(help="Score the test cases of this fold of --reference.")] = None,
    dataset: Annotated[Path | None, typer.Option(help="Draw the median case with images of this dataset.")] = None,
    median_of: Annotated[
        str | None, typer.Option("--median-of", metavar="NAME", help="Whose median case.", show_default="--against")
    ] = None,
    empty: Annotated[Literal["50", "nan"], typer.Option(help="HD95 of an empty prediction: 50, or left out.")] = "50",
    unranked: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Never best or second, as an upper bound; repeatable.")
    ] = None,
) -> None:
    """Compare runs: a table as in papers (Markdown, CSV, LaTeX, HTML), box plots per class, a qualitative figure."""
    from pclmix.io.files import refuse_existing, require_writable
    from pclmix.report import tables
    from pclmix.report.compare import compare as compare_runs
    from pclmix.report.runs import read_runs

    refuse_existing(out)
    require_writable(out)
    with options.progress("reading runs") as tell:
        read = read_runs(runs, reference, fold=fold, progress=tell)
        table = compare_runs(
            read,
            out,
            against=against,
            dataset=dataset,
            median_of=median_of,
            empty=empty,
            unranked=tuple(unranked or ()),
        )
    typer.echo(tables.markdown(table))
    typer.echo(f"written: {out}/report.html and table.md, table.csv, table.tex, compare.json, figures")
