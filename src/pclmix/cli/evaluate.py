"""`pclmix evaluate`: scores of predictions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pclmix.cli import app

if TYPE_CHECKING:
    from rich.console import Console

    from pclmix.evaluate import Statistic, Summary
    from pclmix.evaluate.bootstrap import Interval


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
    fold: Annotated[int | None, typer.Option(help="Expect the test cases of this fold of the dataset REF.")] = None,
    largest_component: Annotated[
        bool, typer.Option("--largest-component", help="Keep only the largest 3D part of each class first.")
    ] = False,
    ignore_headers: Annotated[
        bool, typer.Option("--ignore-headers", help="Accept predictions whose header differs but whose shape does not.")
    ] = False,
) -> None:
    """Dice, HD95 and ASSD (mm) and volumes, per case and class.

    Files are matched by case name. An empty prediction of a present class has Dice 0 and no HD95, which is counted;
    in the column "empty = 50" it has 50 mm. A class absent from both has no score.
    """
    from rich.console import Console
    from rich.progress import Progress

    from pclmix.errors import PclmixError
    from pclmix.evaluate import evaluate as evaluate_predictions
    from pclmix.files import require_new_file

    for target in (out, csv):
        if target is not None:
            require_new_file(target)
    if out is not None and csv is not None and out.resolve() == csv.resolve():
        raise PclmixError(f"--out and --csv both name {out}; give them two names")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("scoring", total=None)
        summary = evaluate_predictions(
            pred,
            ref,
            fold=fold,
            against=against,
            largest_component=largest_component,
            ignore_headers=ignore_headers,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
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

    from pclmix.evaluate.bootstrap import LEVEL
    from pclmix.evaluate.summary import MEASURES, STATUSES

    count = len(summary.cases)
    table = Table(title=f"{count} case{'s' if count > 1 else ''}, mean (sd)")
    table.add_column("class")
    for heading in ("Dice %", "HD95 mm", "empty = 50", "ASSD mm", "no HD95"):
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
        for heading in ("Dice %", "HD95 mm", "ASSD mm"):  # three columns fit a terminal; the JSON has all
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
