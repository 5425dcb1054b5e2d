"""Arguments and options that several commands have in common, and the settings they stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

DatasetFolder = Annotated[Path, typer.Argument(metavar="DATASET", help="A dataset folder, with dataset.json in it.")]
TrainingDataset = Annotated[Path, typer.Argument(help="A dataset folder (dataset.json, imagesTr, labelsTr).")]
DatasetWithFolds = Annotated[Path, typer.Argument(help="A dataset folder with folds in splits_final.json.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.")]
Method = Annotated[str | None, typer.Option(help="A name of `pclmix methods`.", show_default="pclmix")]
Recipe = Annotated[str | None, typer.Option(help="paper, fast, hull, tiny or a .yaml file.", show_default="fast")]
Iterations = Annotated[int | None, typer.Option(help="Number of steps.")]
IterationsOfEach = Annotated[int | None, typer.Option("--iterations", help="Number of steps of each run.")]
Seed = Annotated[int | None, typer.Option(help="Seed of everything random.")]
SeedOfEach = Annotated[int | None, typer.Option("--seed", help="Seed of everything random, the same for each run.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
LargestComponent = Annotated[
    bool, typer.Option("--largest-component", help="Keep only the largest 3D part of each class.")
]


def settings(
    overrides: Sequence[str] | None, *, iterations: int | None, seconds: float | None = None, seed: int | None
) -> list[str]:
    """Options and KEY=VALUE arguments as one list of settings; an argument comes later, so it wins."""
    given = {"engine.iterations": iterations, "engine.seconds": seconds, "seed": seed}
    return [*(f"{key}={value}" for key, value in given.items() if value is not None), *(overrides or [])]


def numbers_by_name(option: str, given: Sequence[str] | None) -> dict[str, float] | None:
    """NAME=VALUE of a repeated option; None where it was not given."""
    from pclmix.errors import PclmixError

    if given is None:
        return None
    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.rpartition("=")
        if name in found:
            raise PclmixError(f"{option} {text}: {name} has a value already; give each name once")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = float("nan")
        if not name or not math.isfinite(found[name]):
            raise PclmixError(f"{option} {text}: a name and a number are needed, such as {option} LV=1.5")
    return found
