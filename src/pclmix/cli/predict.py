"""`pclmix predict`: label maps from images."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pclmix.cli import app, options


class Flips(StrEnum):
    none = "none"
    flip = "flip"


@app.command(epilog="Example: pclmix predict run1 data/acdc run1/predictions --fold 1 --tta flip")
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run folder, a checkpoint or an exported .onnx.")],
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="An image, a folder of images, a DICOM series or a dataset.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder that gets CASE.nii.gz.")],
    fold: Annotated[int | None, typer.Option(help="Only the test cases of this fold of the dataset INPUT.")] = None,
    tta: Annotated[Flips, typer.Option(help="Average over flipped copies of each slice.")] = Flips.none,
    largest_component: options.LargestComponent = False,
    uncertainty: Annotated[
        bool,
        typer.Option("--uncertainty", help="Write entropy maps, a quality estimate a case, and where to draw next."),
    ] = False,
    slicer: Annotated[bool, typer.Option("--slicer", help="Write CASE.seg.nrrd too, for 3D Slicer.")] = False,
    dicom_seg: Annotated[
        bool, typer.Option("--dicom-seg", help="Write CASE.seg.dcm too; INPUT must be a DICOM series.")
    ] = False,
    net: Annotated[
        str, typer.Option(help="Of a method with several networks: one of them, such as net2, or ensemble.")
    ] = "net",
    offset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS=VALUE",
            help="Add VALUE to the score of CLASS: more of the borders that strokes left open, or less. Repeatable.",
            show_default="the run's own",
        ),
    ] = None,
    device: options.Device = "auto",
    batch: Annotated[
        int | None, typer.Option(help="Slices through the network at once.", show_default="by device")
    ] = None,
) -> None:
    """Predict label maps at the images' own size, with their geometry and the names of the classes.

    labels.txt in OUT has names and colours for ITK-SNAP.

    Files named CASE_0000, CASE_0001, ... are the channels of one case. A dataset is predicted whole, or the test
    cases of --fold. What is in OUT already is skipped; a file that cannot be read is reported at the end (exit
    code 2), and the others go on. With --uncertainty OUT gets uncertainty/CASE.nii.gz (entropy in nats), quality.csv
    (expected Dice, the worst case first) and slices.csv (all slices, those most worth a scribble first).
    """
    from rich.console import Console
    from rich.progress import Progress

    from pclmix.errors import PclmixError
    from pclmix.files import require_writable
    from pclmix.predict import load
    from pclmix.predict.files import predict_files

    console = Console(stderr=True)
    if source.exists() and out.resolve() == source.resolve():
        raise PclmixError(f"{out} is INPUT itself; choose another OUT, so that labels and images stay apart")
    require_writable(out)
    favoured = options.numbers_by_name("--offset", offset)
    if uncertainty and model.suffix.lower() != ".onnx":
        from pclmix.predict.dual import load_uncertain

        predictor = load_uncertain(model, device=device, batch=batch, net=net, offset=favoured)
    else:
        predictor = load(model, device=device, batch=batch, net=net, offset=favoured)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("predicting", total=None)
        outcome = predict_files(
            predictor,
            source,
            out,
            fold=fold,
            tta="flip" if tta is Flips.flip else "none",
            largest_component=largest_component,
            uncertainty=uncertainty,
            also=[*(["slicer"] if slicer else []), *(["dicom"] if dicom_seg else [])],  # type: ignore[list-item]
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if outcome.trained_on:
        console.print(f"note: the model was trained on {outcome.trained_on} of these cases", highlight=False)
    skipped = f", {len(outcome.skipped)} were there already" if outcome.skipped else ""
    typer.echo(f"{len(outcome.done)} predicted{skipped}: {out}")
    outcome.require_good()
