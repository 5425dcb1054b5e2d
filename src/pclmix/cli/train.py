"""Commands around training: config, methods, plan, train."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pclmix.cli import app, options

if TYPE_CHECKING:
    from pclmix.config import Section
    from pclmix.methods.base import Method

_NETS = ("unet", "resnet50")
_CLASSES = 4
_COLUMN = 30  # where the comments of `config` begin


@app.command(epilog="Example: pclmix train data/acdc --out run1 --recipe fast --fold 1 optim.lr=0.01")
def train(
    dataset: options.Dataset,
    overrides: options.Overrides = None,
    out: Annotated[Path, typer.Option(help="The run folder to make.")] = ...,  # type: ignore[assignment]
    method: options.Method = None,
    recipe: options.Recipe = None,
    start_from: Annotated[
        Path | None, typer.Option("--from", help="A run to take weights from, classes matched by name.")
    ] = None,
    fold: Annotated[int | None, typer.Option(help="Leave out the test cases of this fold, counted from 1.")] = None,
    iterations: options.Iterations = None,
    seconds: options.Seconds = None,
    minutes: options.Minutes = None,
    seed: options.Seed = None,
    device: options.Device = "auto",
    devices: options.Devices = 1,
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint, or start.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print plan, memory and time after timing a few steps; write nothing.")
    ] = False,
) -> None:
    """Train a method on the scribbles of a dataset.

    Without --recipe the settings are planned from the data, as `pclmix plan` does, after timing a few steps; the plan
    is written into the run folder. Without --fold all training cases are used. The dataset is checked first; an
    existing run folder is refused unless --resume is given. Ctrl-C saves a checkpoint and prints the command that
    continues.
    """
    started = time.time()  # before torch is imported
    from pclmix.report.training import draw_run
    from pclmix.training.request import TrainRequest
    from pclmix.training.start import run_training

    request = TrainRequest(
        dataset,
        out,
        method=method,
        recipe=recipe,
        overrides=options.settings(overrides, iterations=iterations, seconds=seconds, seed=seed),
        fold=fold,
        resume=resume,
        device=device,
        devices=devices,
        nodes=nodes,
        minutes=minutes,
        start_from=start_from,
        started=started,
    )
    if dry_run:
        from pclmix.training.start import dry_run as forecast

        forecast(request)
        return
    if not run_training(request):
        raise typer.Exit(130)
    draw_run(request.out)


@app.command(epilog="Example: pclmix config fast optim.lr=0.01 --method pce > mine.yaml")
def config(
    recipe: options.RecipeArgument,
    overrides: options.Overrides = None,
    method: options.Method = None,
) -> None:
    """Print every setting of a recipe with its meaning, as YAML that --recipe takes.

    The values are those of a run: the recipe, its deviations for the method, then KEY=VALUE arguments.
    """
    from pclmix.config import load_config
    from pclmix.methods.base import require_fitting

    resolved = load_config(recipe, method, overrides or [])
    params = require_fitting(resolved)
    for line in _lines(resolved, {"params": params}):
        typer.echo(line)


def _lines(section: Section, deeper: dict[str, Section], indent: str = "") -> Iterator[str]:
    """YAML of a section with each field's description as a comment; `deeper` are sections in place of plain tables."""
    import yaml

    from pclmix.config import Section

    values = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = deeper.get(name, getattr(section, name))
        if name == "recipe":  # a recipe is named by its file
            continue
        if isinstance(value, Section) and type(value).model_fields:
            yield f"{indent}{name}:"
            yield from _lines(value, {}, f"{indent}  ")
            continue
        plain = values[name] if name not in deeper else {}
        text = yaml.safe_dump(plain, default_flow_style=True, width=10**6, allow_unicode=True).split("\n")[0]
        start = f"{indent}{name}: {text}"
        for sentence in textwrap.wrap(field.description or "", 120 - _COLUMN):
            yield f"{start:<{_COLUMN}}# {sentence}"
            start = ""
        if start:
            yield start


@app.command(epilog="Example: pclmix methods --verbose")
def methods(
    verbose: Annotated[bool, typer.Option("--verbose", help="Also count parameters on each network.")] = False,
    as_json: options.Json = False,
) -> None:
    """List the methods for `train --method`, their source and what they need.

    --verbose adds the parameters of the network that predicts and of all that training updates, in millions, for one
    input channel and four classes.
    """
    import json

    from pclmix.methods.base import METHODS, load_all

    load_all()
    rows = [_row(name, method, verbose) for name, method in METHODS]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print(rows, verbose)


def _row(name: str, method: type[Method], verbose: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": name,
        "summary": method.summary,
        "source": method.source,
        "needs": method.needs,
        "inference_nets": list(method.inference_nets),
    }
    if verbose:
        row["parameters"] = {net: _parameters(method, net) for net in _NETS}
    return row


def _parameters(method: type[Method], net: str) -> dict[str, int] | None:
    """Counts of inference and training; None where the method does not run on that network."""
    import torch

    from pclmix.errors import PclmixError
    from pclmix.methods.base import Task, build_params
    from pclmix.nets.segmenter import count_parameters

    try:
        with torch.device("meta"):  # shapes without memory
            built = method(Task(net, 1, _CLASSES, (256, 256)), build_params(method, {}))
    except PclmixError:
        return None
    return {"inference": count_parameters(built.net), "training": count_parameters(built)}


def _print(rows: list[dict[str, Any]], verbose: bool) -> None:
    """A table that fits 80 columns; parameter counts are a second one, which keeps rows short."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("needs", no_wrap=True)
    table.add_column("what it is, and its source", overflow="fold")
    for row in rows:
        table.add_row(row["name"], row["needs"], f"{row['summary']} [dim]({row['source']})[/dim]")
    console.print(table)
    if verbose:
        counts = Table(box=None, pad_edge=False, title="parameters: of the network that predicts / of all that trains")
        counts.add_column("name", no_wrap=True)
        for net in _NETS:
            counts.add_column(net, justify="right", no_wrap=True)
        for row in rows:
            counts.add_row(row["name"], *(_millions(row["parameters"][net]) for net in _NETS))
        console.print()
        console.print(counts)


def _millions(counts: dict[str, int] | None) -> str:
    if counts is None:
        return "-"
    return f"{counts['inference'] / 1e6:.1f} M / {counts['training'] / 1e6:.1f} M"


@app.command(epilog="Example: pclmix plan data --minutes 10 --out plan.yaml")
def plan(
    dataset: options.Dataset,
    out: Annotated[Path | None, typer.Option(help="The file to write.", show_default="print it")] = None,
    minutes: Annotated[float, typer.Option(help="Minutes to train for.")] = 5.0,
    device: options.Device = "auto",
    fold: Annotated[int | None, typer.Option(help="Leave out the test cases of this fold, counted from 1.")] = None,
) -> None:
    """Choose settings from the data: size, patches, intensities, network, batch and steps, each with its reason.

    The plan is a recipe to read and to change; `pclmix train DATASET --out RUN --recipe plan.yaml` takes it. The same
    dataset, device and minutes give the same plan. Nothing is trained or timed.
    """
    from pclmix.data.dataset import Dataset
    from pclmix.errors import PclmixError
    from pclmix.io.files import atomic_path, require_new_file
    from pclmix.training.plan import plan_dataset, training_cases

    if out is not None:
        if out.suffix not in (".yaml", ".yml"):
            raise PclmixError(f"--out {out}: a plan is a recipe, whose name ends in .yaml")
        require_new_file(out)
    opened = Dataset.open(dataset)
    made = plan_dataset(opened, training_cases(opened, fold), device=device, minutes=minutes, show=True)
    for note in (*made.strokes, *made.notes):
        typer.echo(note, err=True)
    if out is None:
        typer.echo(made.text, nl=False)
        return
    with atomic_path(out) as temporary:
        temporary.write_text(made.text, encoding="utf-8")
    typer.echo(f"{out}: about {made.steps} steps of PCLMix in {minutes:g} minutes")
    typer.echo(f"next: pclmix train {quote(str(dataset))} --out RUN --recipe {quote(str(out))}")
