"""Commands around trained models: predict, evaluate, compare, calibrate, export."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pclmix.cli import app, options

if TYPE_CHECKING:
    from rich.console import Console

    from pclmix.inference.files import Also
    from pclmix.metrics import Statistic, Summary
    from pclmix.metrics.comparison import Interval


@app.command(epilog="Example: pclmix predict run1 data/acdc run1/predictions --fold 1 --tta flip")
def predict(
    model: options.Model,
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="An image, a folder, a .txt list, a DICOM series or a dataset.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder for CASE.nii.gz, or a file.")],
    fold: options.Fold = None,
    tta: options.TTA = "none",
    largest_component: options.LargestComponent = False,
    uncertainty: Annotated[
        bool, typer.Option("--uncertainty", help="Also write entropy maps, quality.csv and slices.csv.")
    ] = False,
    slicer: Annotated[bool, typer.Option("--slicer", help="Also write CASE.seg.nrrd, for 3D Slicer.")] = False,
    dicom_seg: Annotated[
        bool, typer.Option("--dicom-seg", help="Also write CASE.seg.dcm; INPUT must be a DICOM series.")
    ] = False,
    net: Annotated[
        str, typer.Option(help="For methods with several networks: one of them, such as net2, or ensemble.")
    ] = "net",
    device: options.Device = "auto",
    batch: Annotated[int | None, typer.Option(help="Slices per forward pass.", show_default="by device")] = None,
    cluster: options.Cluster = None,
    cores: options.Cores = None,
    gpus: options.Gpus = None,
    workers: Annotated[
        int | None, typer.Option(help="With --cluster: workers at most.", show_default="as many as fit", min=1)
    ] = None,
) -> None:
    """Predict label maps at the images' own size, with their geometry and the names of the classes.

    Files named CASE_0000, CASE_0001, ... are the channels of one case. A .txt file lists images or DICOM series, a path
    on each line. Cases that OUT holds already are skipped. A file that cannot be read is reported at the end (exit code
    2), the others are predicted. labels.txt in OUT has the names and colours for ITK-SNAP.

    --uncertainty writes uncertainty/CASE.nii.gz (entropy in nats), quality.csv (certainty and expected Dice of each
    case, the least certain first) and slices.csv (where a new scribble helps most).
    """
    from rich.console import Console

    from pclmix.errors import PclmixError
    from pclmix.io.files import require_writable

    if source.exists() and out.resolve() == source.resolve():
        raise PclmixError(f"{out} is INPUT itself; choose another OUT, so that labels and images stay apart")
    for name, value in (("--workers", workers), ("--cores", cores), ("--gpus", gpus)):
        if value is not None and cluster is None:
            raise PclmixError(f"{name} {value:g} needs --cluster")
    require_writable(out)
    also: tuple[Also, ...] = tuple(kind for kind, wanted in (("slicer", slicer), ("dicom", dicom_seg)) if wanted)  # type: ignore[misc]
    with options.progress("predicting") as tell:
        if cluster is not None:
            from pclmix.cluster.engine import ClusterOptions
            from pclmix.cluster.predict import predict_on_cluster
            from pclmix.inference.files import Choices

            outcome = predict_on_cluster(
                model,
                source,
                out,
                ClusterOptions(cluster, cores, gpus),
                Choices(tta, largest_component, uncertainty, also),
                fold=fold,
                device=device,
                batch=batch,
                net=net,
                workers=workers,
                progress=tell,
            )
        else:
            from pclmix.inference import load
            from pclmix.inference.files import predict_files

            outcome = predict_files(
                load(model, device=device, batch=batch, net=net),
                source,
                out,
                fold=fold,
                tta=tta,
                largest_component=largest_component,
                uncertainty=uncertainty,
                also=also,
                progress=tell,
            )
    if outcome.trained_on:
        note = f"note: the model was trained on {outcome.trained_on} of these cases"
        Console(stderr=True).print(note, highlight=False)
    skipped = f", {len(outcome.skipped)} were there already" if outcome.skipped else ""
    if outcome.done or outcome.skipped:
        typer.echo(f"{len(outcome.done)} predicted{skipped}: {out}")
    outcome.require_good()


@app.command(epilog="Example: pclmix calibrate run1 data/acdc")
def calibrate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of `pclmix train`.")],
    dataset: Annotated[Path, typer.Argument(metavar="DATASET", help="Scribbles; those trained on are left out.")],
    device: options.Device = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier calibration of the run.")] = False,
) -> None:
    """Fit the temperature of a run's probabilities to scribbles that it was not trained on.

    Uses the validation cases of the run (train with data.validation=0.1), never the test cases of its fold. RUN gets
    calibration.json, which every later prediction reads, and reliability.png. Labels do not change, except for ties
    under --tta flip.
    """
    from pclmix.inference.calibrate import calibrate as fit_temperature
    from pclmix.io.files import require_writable

    if run.is_dir():
        require_writable(run)
    with options.progress("predicting") as tell:
        report = fit_temperature(run, dataset, device=device, overwrite=overwrite, progress=tell)
    for name, key, title in (("cnn", "temperature", "CNN decoder"), ("mean", "mean_temperature", "both decoders")):
        if name in report:
            before, after = report[name]["before"], report[name]["after"]
            typer.echo(
                f"{title}: temperature {report[key]:.3f}, calibration error {100 * before['ece']:.2f} % -> "
                f"{100 * after['ece']:.2f} %, log loss {before['nll']:.4f} -> {after['nll']:.4f}"
            )
    typer.echo(f"{report['pixels']} scribbled pixels of {len(report['cases'])} cases: {run / 'calibration.json'}")


@app.command(epilog="Example: pclmix export run1 heart.onnx --precision int8 --calibration data/acdc")
def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run folder of `pclmix train` or a checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .onnx file to write, or the bundle's folder.")],
    format: Annotated[Literal["onnx", "bundle"], typer.Option(help="An ONNX file or a MONAI bundle.")] = "onnx",
    precision: Annotated[Literal["fp32", "fp16", "int8"], typer.Option(help="Of the weights.")] = "fp32",
    images: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            "--images",
            help="An image, a folder or a dataset: the export is compared with the original on it, and int8 is "
            "calibrated on it. By default fp32 and fp16 are compared on the phantom; int8 needs it.",
        ),
    ] = None,
) -> None:
    """Write a model as one ONNX file, which `predict` takes as MODEL, or as a MONAI bundle.

    The file is run by onnxruntime and compared with the original on real slices before it is kept; the figures are
    written beside it as .json, its model card as .md. int8 is fastest on CPUs with VNNI. A bundle is a folder with
    weights and configuration that `python -m monai.bundle run` executes.
    """
    from rich.console import Console

    from pclmix.errors import PclmixError

    if format == "bundle" and precision != "fp32":
        raise PclmixError(f"--precision {precision} is for ONNX files; a bundle keeps the trained weights")
    with Console(stderr=True).status("exporting and comparing"):
        if format == "bundle":
            from pclmix.export.bundle import export_bundle

            report = export_bundle(model, out, images=images)
            size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        else:
            from pclmix.export.onnx import export_onnx

            report = export_onnx(model, out, precision=precision, images=images)
            size = report["bytes"]
    change = report["dice_change_points"]
    dice = f", Dice {change:+.2f} points" if change is not None else ""
    typer.echo(
        f"{out}: {size / 1e6:.1f} MB, largest logit difference {report['max_logit_difference']:.2g}, "
        f"{100 * report['argmax_agreement']:.3f} % of labels as the original{dice} ({report['slices']} slices)"
    )


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
            f"{', '.join(summary.missing)}; the means above leave them out"
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
            metavar="RUN",
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
        str | None,
        typer.Option(
            "--median-of", metavar="NAME", help="The run whose median case is drawn.", show_default="--against"
        ),
    ] = None,
    empty: Annotated[Literal["50", "nan"], typer.Option(help="HD95 of an empty prediction: 50, or left out.")] = "50",
    unranked: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A row without a rank, such as an upper bound; repeatable.")
    ] = None,
) -> None:
    """Compare runs: a table as in papers (Markdown, CSV, LaTeX, HTML), box plots per class, a qualitative figure."""
    from pclmix.io.files import refuse_existing, require_writable
    from pclmix.report import tables
    from pclmix.report.pages import compare as compare_runs
    from pclmix.report.tables import read_runs

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
