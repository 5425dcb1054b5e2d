"""Commands around a trained model: `predict`, `calibrate` and `export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pclmix.cli import app, options

if TYPE_CHECKING:
    from pclmix.inference.files import Also


@app.command(epilog="Example: pclmix predict run1 data/acdc run1/predictions --fold 1 --tta flip")
def predict(
    model: options.Model,
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="An image, a folder of images, a DICOM series or a dataset.")
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
        str, typer.Option(help="Of a method with several networks: one of them, such as net2, or ensemble.")
    ] = "net",
    device: options.Device = "auto",
    batch: Annotated[
        int | None, typer.Option(help="Slices through the network at once.", show_default="by device")
    ] = None,
    cluster: options.Cluster = None,
    cores: options.Cores = None,
    gpus: options.Gpus = None,
    workers: Annotated[
        int | None, typer.Option(help="With --cluster: workers at most.", show_default="all there is room for", min=1)
    ] = None,
) -> None:
    """Predict label maps at the images' own size, with their geometry and the names of the classes.

    Files named CASE_0000, CASE_0001, ... are the channels of one case. Cases that OUT holds already are skipped. A file
    that cannot be read is reported at the end (exit code 2), the others are predicted. labels.txt in OUT has the names
    and colours for ITK-SNAP.

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
    written beside it as .json. int8 is fastest on CPUs with VNNI. A bundle is a folder with weights and configuration
    that `python -m monai.bundle run` executes.
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
        f"{out}: {size / 1e6:.1f} MB, largest difference of a logit {report['max_logit_difference']:.2g}, "
        f"{100 * report['argmax_agreement']:.3f} % of labels as the original{dice} ({report['slices']} slices)"
    )
