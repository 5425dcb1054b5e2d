"""`pclmix serve`: the workbench in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from pclmix.cli import app, options


@app.command(epilog="Example: pclmix serve data/acdc. A new dataset: pclmix serve data/mine --classes RV,Myo,LV")
def serve(
    dataset: options.TrainingDataset,
    host: Annotated[str, typer.Option(help="Address to listen on; any but this computer's own needs a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8765,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
    classes: Annotated[
        str | None, typer.Option(help="Make DATASET anew with these classes; images are then dropped on the page.")
    ] = None,
    max_upload: Annotated[int, typer.Option(help="Largest upload in MiB.", min=1)] = 2048,
) -> None:
    """Draw strokes, train on them, look at the result and correct it, in the browser.

    Everything stays on this computer: strokes are saved into labelsTr as they are drawn, models and history into
    .pclmix beside it. On another address than 127.0.0.1 the printed link carries a token that every request needs.
    """
    from pclmix.web.run import run_server

    run_server(
        dataset,
        host=host,
        port=port,
        browser=browser,
        classes=None if classes is None else classes.split(","),
        max_upload=max_upload,
    )
