"""`pclmix calibrate`: probabilities that mean what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pclmix.cli import app, options


@app.command(epilog="Example: pclmix calibrate run1 data/acdc")
def calibrate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of `pclmix train`.")],
    dataset: Annotated[Path, typer.Argument(metavar="DATASET", help="Scribbles; those trained on are left out.")],
    device: options.Device = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier calibration of the run.")] = False,
) -> None:
    """Find the temperature that fits a run's probabilities to scribbles it was not trained on.

    The validation cases of the run are used (train with data.validation=0.1), never the test cases of its fold. RUN
    gets calibration.json, used by every later prediction from it, and reliability.png. Labels do not change, but for
    ties under --tta flip.
    """
    from rich.console import Console
    from rich.progress import Progress

    from pclmix.files import require_writable
    from pclmix.predict.calibrate import calibrate as find_temperature

    if run.is_dir():
        require_writable(run)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("predicting", total=None)
        report = find_temperature(
            run,
            dataset,
            device=device,
            overwrite=overwrite,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    for name, key, title in (("cnn", "temperature", "CNN decoder"), ("mean", "mean_temperature", "both decoders")):
        if name in report:
            before, after = report[name]["before"], report[name]["after"]
            typer.echo(
                f"{title}: temperature {report[key]:.3f}, calibration error {100 * before['ece']:.2f} % -> "
                f"{100 * after['ece']:.2f} %, log loss {before['nll']:.4f} -> {after['nll']:.4f}"
            )
    typer.echo(f"{report['pixels']} scribbled pixels of {len(report['cases'])} cases: {run / 'calibration.json'}")
