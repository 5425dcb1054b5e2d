"""Arguments and options shared by several commands, and the progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

Dataset = Annotated[
    Path, typer.Argument(metavar="DATASET", help="A dataset folder (dataset.json, imagesTr, labelsTr).")
]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A run folder, a checkpoint or an exported .onnx file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings to change; `pclmix config` lists them."),
]
Method = Annotated[str | None, typer.Option(help="A name of `pclmix methods`.", show_default="pclmix")]
#: Of config.recipe_names, which would import too much for --help.
RECIPES = "paper, fast, hull, rounds, sprint, demo, tiny or a .yaml file"
Recipe = Annotated[str | None, typer.Option(help=f"{RECIPES}.", show_default="a plan from the data")]
StudyRecipe = Annotated[str, typer.Option("--recipe", help=f"{RECIPES}, such as `pclmix plan` writes.")]
RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help=f"{RECIPES}.")]
Fold = Annotated[int | None, typer.Option(help="Take the test cases of this fold of the dataset, counted from 1.")]
Iterations = Annotated[int | None, typer.Option(help="Number of steps.")]
Seconds = Annotated[
    float | None,
    typer.Option(help="Train for this many seconds instead of --iterations; resuming is then not bit-exact."),
]
Minutes = Annotated[
    float | None,
    typer.Option(help="Finish the run within this many minutes.", show_default="5 without a recipe", min=0.0),
]
Seed = Annotated[int | None, typer.Option(help="Random seed.")]
MakerSeed = Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same result.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Devices = Annotated[int, typer.Option(help="Devices on each node.")]
Folds = Annotated[str, typer.Option(help="Such as 1, 1-5, 1,3 or all.")]
TTA = Annotated[
    Literal["none", "flip"], typer.Option(help="Test-time augmentation: average over flipped copies of each slice.")
]
LargestComponent = Annotated[
    bool, typer.Option("--largest-component", help="Keep only the largest 3D component of each class.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="local|auto|ADDRESS",
        help="Run on Ray: all cores and GPUs of this host, the cluster that Ray knows of here, or that at HOST:PORT.",
    ),
]
Cores = Annotated[int | None, typer.Option(help="Cores of each run.", show_default="1 with --cluster", min=1)]
Gpus = Annotated[
    float | None,
    typer.Option(
        help="With --cluster: GPUs of each run, or a fraction to share one.",
        show_default="1 if the cluster has GPUs",
        min=0,
    ),
]
Progress = Callable[[int, int], None]


def settings(
    overrides: Sequence[str] | None, *, iterations: int | None, seconds: float | None = None, seed: int | None
) -> list[str]:
    """Options and KEY=VALUE arguments as one list of settings; arguments override options."""
    given = {"engine.iterations": iterations, "engine.seconds": seconds, "seed": seed}
    return [*(f"{key}={value}" for key, value in given.items() if value is not None), *(overrides or [])]


@contextmanager
def progress(doing: str) -> Iterator[Progress]:
    """A progress bar on stderr: yields a function of the number done and the total."""
    from rich import progress as bars
    from rich.console import Console

    with bars.Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
