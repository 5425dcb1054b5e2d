"""`pclmix demo`: the whole way on built-in data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pclmix.cli import app


@app.command(epilog="Example: pclmix demo --out demo --overwrite")
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make.")] = Path("demo"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the phantom and of training.")] = 0,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of training for each of the two methods.")] = 80.0,
) -> None:
    """Train PCLMix and partial cross-entropy from the same scribbles on a phantom, and compare them in one page.

    Both have the same encoder, augmentation and seconds. Patients neither has seen are scored and shown in
    DIR/report.html, which opens offline; DIR/demo.json has the scores. Under four minutes on two cores.
    """
    # Read by OpenMP when torch is loaded: threads that wait must not take the core of one that works.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from pclmix.report.demo import REPORT, run_demo
    from pclmix.report.page import verdict

    result = run_demo(out, seed=seed, seconds=seconds, overwrite=overwrite)
    typer.echo(verdict(result))
    typer.echo(f"report: {(out / REPORT).resolve()}")
