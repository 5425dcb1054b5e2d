"""`pclmix methods`: what can be trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pclmix.cli import app

if TYPE_CHECKING:
    from pclmix.methods.base import Method

_NETS = ("unet", "resnet50")
_CLASSES = 4


@app.command(epilog="Example: pclmix methods --verbose")
def methods(
    verbose: Annotated[bool, typer.Option("--verbose", help="Count parameters on each network, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the methods that `pclmix train --method` knows, where they come from and what they need.

    With --verbose also the parameters of the model that predicts and of all that training updates, in millions, for
    one input channel and four classes.
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
    from pclmix.nets.parameters import count_parameters

    try:
        with torch.device("meta"):  # shapes without memory
            built = method(Task(net, 1, _CLASSES, (256, 256)), build_params(method, {}))
    except PclmixError:
        return None
    return {"inference": count_parameters(built.net), "training": count_parameters(built)}


def _print(rows: list[dict[str, Any]], verbose: bool) -> None:
    """A table that fits 80 columns; parameter counts are a second one, as a row of everything would not."""
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
        counts = Table(box=None, pad_edge=False, title="parameters: of the model that predicts / of all that trains")
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
