"""`pclmix info`: what a run, a dataset or an exported model is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pclmix.cli import app, options


@app.command(epilog="Example: pclmix info run1")
def info(
    target: Annotated[
        Path, typer.Argument(metavar="RUN|DATASET|MODEL", help="A run folder, a checkpoint, a .onnx file or a dataset.")
    ],
    as_json: options.Json = False,
) -> None:
    """Describe a run, a dataset or an exported model: data, classes, recipe, steps, scores, versions."""
    from json import dumps

    from rich.console import Console
    from rich.table import Table

    from pclmix.export.card import model_card, shown

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
            table.add_row(section, "; ".join(f"{name}: {value}" for name, value in known.items()))
    Console(highlight=False, markup=False).print(table)


def _dataset(root: Path) -> dict[str, dict[str, Any]]:
    from pclmix.data.dataset import Dataset
    from pclmix.data.splits import patient_of

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
        "folds": [f"{number}: {len(fold.train)} + {len(fold.test)}" for number, fold in enumerate(folds, start=1)],
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
