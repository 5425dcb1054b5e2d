"""Commands around datasets: import, check, split, phantom, scribble, dicom, info, serve."""

from __future__ import annotations

from collections import Counter
from itertools import count
from json import dumps
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pclmix.cli import app, options

if TYPE_CHECKING:
    from pclmix.data.case import Report

_ROWS = 10  # findings of one kind in the table of `check`


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
    skip_unmatched: Annotated[
        bool, typer.Option("--skip-unmatched", help="Leave out images without labels, and labels without an image.")
    ] = False,
    dense: Annotated[
        bool, typer.Option("--dense", help="folder: cases with a dense mask and no scribble are labelled by the mask.")
    ] = False,
    unlabelled: Annotated[
        bool, typer.Option("--unlabelled", help="folder: images without a scribble become unlabelled cases.")
    ] = False,
) -> None:
    """Make a dataset from images and scribbles in another layout; the images are not changed."""
    from pclmix.data.importers import Options, import_dataset

    names = tuple(part for part in classes.split(",") if part.strip())
    chosen = Options(scribbles, masks, nifti, names, ignore, skip_unmatched, dense, unlabelled)
    made, notes = import_dataset(kind, source, dataset, chosen, show=True)
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
    dataset: options.Dataset,
    as_json: options.Json = False,
    size: Annotated[
        tuple[int, int] | None,
        typer.Option(min=1, metavar="H W", help="Working size to check the strokes at.", show_default="256 256"),
    ] = None,
) -> None:
    """Check a dataset: read every file and list errors (exit code 2) and warnings (exit code 0)."""
    from pclmix.data.check import check_folder
    from pclmix.errors import PclmixError

    report = check_folder(dataset, size=size, show=not as_json)
    if as_json:
        typer.echo(dumps(report.to_json(), indent=2))
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
    kept = "kept at {} x {}".format(*report.size)
    classes = Table("class", "pixels drawn", "of all pixels", "cases with a stroke", kept, box=box.SIMPLE)
    for share in report.classes:
        cases = f"{share.cases} of {report.cases}"
        classes.add_row(share.name, str(share.pixels), f"{share.share:.3%}", cases, f"{share.kept:.1%}")
    console.print(classes)
    if report.habits:
        habits = Table("class", "stroke habit", "stated", "holds by strokes", "by dense masks", box=box.SIMPLE)
        for habit in report.habits:
            seen = [f"{s.held} of {s.tested} slices" if s.tested else "-" for s in (habit.strokes, habit.masks)]
            habits.add_row(habit.name, habit.habit, "yes" if habit.stated else "no", *seen)
        console.print(habits)
    if report.findings:
        findings = Table("", "case", "finding", box=box.SIMPLE)
        kinds = Counter((finding.level, finding.kind) for finding in report.findings)
        shown: Counter[tuple[str, str]] = Counter()
        for finding in report.findings:
            kind = (finding.level, finding.kind)
            shown[kind] += 1
            if shown[kind] > _ROWS:
                continue
            colour = "red" if finding.level == "error" else "yellow"
            message = finding.message.replace(f"{report.dataset}/", "")
            findings.add_row(f"[{colour}]{finding.level}[/]", escape(finding.case), escape(message))
            if shown[kind] == _ROWS and kinds[kind] > _ROWS:
                findings.add_row("", "", f"and {kinds[kind] - _ROWS} more of this kind: see --json")
        console.print(findings)
    if report.suggested_habits:
        said = dumps(report.suggested_habits, ensure_ascii=False)
        console.print(
            f'Habits that the data support. If they are true, add to dataset.json: "habits": {said}', markup=False
        )
    console.print(
        f"{report.cases} cases, {report.references} with a dense mask: "
        f"{len(report.errors)} errors, {len(report.warnings)} warnings",
        soft_wrap=True,
    )


@app.command("split", epilog="Example: pclmix split acdc --folds 4 --seed 1 --kind patient")
def split_(
    dataset: options.Dataset,
    folds: Annotated[
        int | None, typer.Option(min=1, help="Number of folds; default 5, or fewer with few patients.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Shuffle the patients; without it they stay in order.")
    ] = None,
    kind: Annotated[
        str, typer.Option(help="patient, or acdc: twenty consecutive patient numbers per fold.")
    ] = "patient",
) -> None:
    """Write new folds, by patient, to splits_final.json; splits_previous.json keeps the old ones."""
    from pclmix.data.dataset import Dataset, make_splits, replace_splits

    opened = Dataset.open(dataset)
    splits = make_splits(opened.cases, kind=kind, count=folds, seed=seed, pattern=opened.patient_pattern)
    replace_splits(dataset, splits)
    for number, split in enumerate(splits, start=1):
        typer.echo(f"fold {number}: {len(split.train)} cases to train on, {len(split.test)} to test")


@app.command(epilog="Example: pclmix phantom data/phantom --cases 12 --seed 0")
def phantom(
    out: Annotated[Path, typer.Argument(help="The dataset folder to write; must not exist.", show_default=False)],
    cases: Annotated[int, typer.Option(min=1, max=999, help="Patients, two frames each.")] = 12,
    seed: options.MakerSeed = 0,
) -> None:
    """Make a synthetic cardiac dataset: images, simulated scribbles, dense masks, folds by patient.

    Cases are named phantomXXX_frame01 (relaxed) and phantomXXX_frame02 (contracted); the classes are RV, Myo, LV.
    """
    from pclmix.synth.phantom import make_phantom

    done = count(1)
    with options.progress("making cases") as tell:
        names = make_phantom(out, cases, seed, progress=lambda _: tell(next(done), 2 * cases))
    typer.echo(f"{out}: {len(names)} cases of {cases} patients; next: pclmix check {quote(str(out))}")


@app.command(epilog="Example: pclmix scribble masks scribbles --amount 0.5 --seed 1")
def scribble(
    masks: Annotated[
        Path, typer.Argument(metavar="MASKS", help="A folder of dense label files, or a dataset with dense masks.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; must not exist.")],
    kind: Annotated[
        str,
        typer.Option(
            help="scribble; brush: broad strokes, as on a tablet; points: one per region, five for the background; "
            "box: its outline as background."
        ),
    ] = "scribble",
    amount: Annotated[float, typer.Option(help="Length of the strokes; 1 is about that of the ACDC scribbles.")] = 1.0,
    width: Annotated[
        int, typer.Option(help="Strokes are 1 to this many pixels wide, at random; a brush has this width.")
    ] = 1,
    border: Annotated[float, typer.Option(help="Share of each outline that is drawn as well, just inside it.")] = 0.0,
    seed: options.MakerSeed = 0,
) -> None:
    """Simulate scribbles, points or boxes from dense masks, per slice and class, background included.

    MASKS is a dataset (dense masks in referenceTr; or in labelsTr, where its labels have no 'ignore'): OUT becomes a
    complete dataset with the same images and folds, the drawn labels in labelsTr, the dense masks in referenceTr.

    MASKS is a folder of label files (below it, files named NAME_gt, _mask, _label or _seg where there are such, else
    all): OUT holds one label file each, with the highest value plus one where nothing is drawn. With the images,
    `pclmix import folder IMAGES DATASET --scribbles OUT --masks MASKS` then makes the dataset.
    """
    from pclmix.synth.scribble import Style
    from pclmix.synth.weaken import weaken

    number, following = weaken(masks, out, Style(kind, amount, width, border), seed, show=True)
    typer.echo(f"{out}: {number} cases, {following}")


@app.command(epilog="Example: pclmix dicom scans/series7 images/patient7_0000.nii.gz")
def dicom(
    series: Annotated[Path, typer.Argument(metavar="SERIES", help="A folder with the slices of one series.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .nii.gz file to write.")],
) -> None:
    """Convert a DICOM series to NIfTI with its geometry, to draw scribbles on it or to train with it.

    A folder with two series, or with several images of one position, is refused. `pclmix predict` reads the folder
    itself.
    """
    from pclmix.io.dicom import convert_series

    shape, spacing = convert_series(series, out)
    sizes = " x ".join(str(n) for n in shape)
    typer.echo(f"{out}: {sizes} (Z, H, W), {' x '.join(f'{s:.4g}' for s in spacing)} mm")


@app.command(epilog="Example: pclmix info run1")
def info(
    target: Annotated[
        Path, typer.Argument(metavar="RUN|DATASET|MODEL", help="A run folder, a checkpoint, a .onnx file or a dataset.")
    ],
    as_json: options.Json = False,
) -> None:
    """Describe a run, a dataset or an exported model: data, classes, recipe, steps, scores, versions."""
    from rich.console import Console
    from rich.table import Table

    from pclmix.export.bundle import model_card, shown

    content = _dataset(target) if (target / "dataset.json").is_file() else model_card(target)
    if as_json:
        typer.echo(dumps(content, indent=2))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for section, rows in content.items():
        known = {name: shown(value) for name, value in rows.items() if value is not None}
        if section == "dataset":  # the only section: a line each
            for name, value in known.items():
                table.add_row(name, value)
        else:
            table.add_row(section, "; ".join(f"{name}: {value.removesuffix('.')}" for name, value in known.items()))
    Console(highlight=False, markup=False).print(table)


def _dataset(root: Path) -> dict[str, dict[str, Any]]:
    from pclmix.data.dataset import Dataset, patient_of

    dataset = Dataset.open(root)
    folds = dataset.splits()
    rows: dict[str, Any] = {
        "name": dataset.name,
        "cases": len(dataset.cases),
        "patients": len({patient_of(case, dataset.patient_pattern) for case in dataset.cases}),
        "with dense masks": sum(dataset.has_reference(case) for case in dataset.cases),
        "channels": list(dataset.channels),
        "classes": list(dataset.labels.names),
        "files": dataset.ending,
        "folds": [f"{n}: {len(fold.train)} train + {len(fold.test)} test" for n, fold in enumerate(folds, start=1)],
        "habits": {name: list(words) for name, words in dataset.habits.items()},
    }
    if dataset.cases:
        volume = dataset.read_image(dataset.cases[0])
        rows["first image"] = (
            " x ".join(str(n) for n in volume.geometry.shape)
            + " (Z, H, W), "
            + (" x ".join(f"{s:.4g}" for s in volume.geometry.spacing) + f" {volume.geometry.unit}")
        )
    return {"dataset": rows}


@app.command(epilog="Example: pclmix serve data/acdc. A new dataset: pclmix serve data/mine --classes RV,Myo,LV")
def serve(
    dataset: options.Dataset,
    host: Annotated[str, typer.Option(help="Address to listen on; any but 127.0.0.1 needs a token.")] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(help="Port; 0 selects a free one.", min=0, max=65535)] = 8765,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
    classes: Annotated[
        str | None, typer.Option(help="Make a new DATASET with these classes; then drop images on the page.")
    ] = None,
    max_upload: Annotated[int, typer.Option(help="Largest upload in MiB.", min=1)] = 2048,
    monailabel: Annotated[
        bool, typer.Option("--monailabel", help="Also serve 3D Slicer, through its MONAI Label module.")
    ] = False,
) -> None:
    """Draw strokes, train on them, review the result and correct it, in the browser.

    Everything stays on this computer: strokes are saved into labelsTr as they are drawn, models and history into
    .pclmix beside it. For another address than 127.0.0.1 the printed link contains a token that every request needs.
    """
    from pclmix.errors import PclmixError, install_hint

    try:
        from pclmix.web.serve import run_server
    except ModuleNotFoundError as error:
        if error.name not in ("h11", "uvicorn", "fastapi", "starlette", "python_multipart"):
            raise
        raise PclmixError(f"the workbench needs the package {error.name}: {install_hint('web', error.name)}") from error
    run_server(
        dataset,
        host=host,
        port=port,
        browser=browser,
        classes=None if classes is None else classes.split(","),
        max_upload=max_upload,
        monailabel=monailabel,
    )
