"""`pclmix export`: a trained model as a file for other programs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pclmix.cli import app


class Precision(StrEnum):
    fp32 = "fp32"
    fp16 = "fp16"
    int8 = "int8"


class Format(StrEnum):
    onnx = "onnx"
    bundle = "bundle"


@app.command(epilog="Example: pclmix export run1 heart.onnx --precision int8 --calibration data/acdc")
def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run folder of `pclmix train` or a checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .onnx file to write, or the bundle's folder.")],
    format: Annotated[Format, typer.Option(help="An ONNX file or a MONAI bundle.")] = Format.onnx,
    precision: Annotated[Precision, typer.Option(help="Of the numbers inside.")] = Precision.fp32,
    images: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            "--images",
            help="An image, a folder or a dataset: the export is compared with the original on it, and int8 is "
            "calibrated on it. Without it fp32 and fp16 are compared on the phantom; int8 needs it.",
        ),
    ] = None,
) -> None:
    """Write a model as one ONNX file that takes any number of slices, and predict with it later as MODEL.

    Before it is kept the file is run by onnxruntime and compared with the original on real slices; the figures are
    written beside it as .json. int8 is fastest on CPUs with VNNI. A bundle is a folder with weights and configuration
    that `python -m monai.bundle run` executes.
    """
    from rich.console import Console

    from pclmix.errors import PclmixError

    if format is Format.bundle and precision is not Precision.fp32:
        raise PclmixError(f"--precision {precision.value} is for ONNX files; a bundle keeps the trained weights")
    with Console(stderr=True).status("exporting and comparing"):
        if format is Format.bundle:
            from pclmix.export.bundle import export_bundle

            report = export_bundle(model, out, images=images)
            size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        else:
            from pclmix.export.onnx import export_onnx

            report = export_onnx(model, out, precision=precision.value, images=images)
            size = report["bytes"]
    change = report["dice_change_points"]
    dice = f", Dice {change:+.2f} points" if change is not None else ""
    typer.echo(
        f"{out}: {size / 1e6:.1f} MB, largest difference of a logit {report['max_logit_difference']:.2g}, "
        f"{100 * report['argmax_agreement']:.3f} % of labels as the original{dice} ({report['slices']} slices)"
    )
