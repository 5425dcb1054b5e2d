"""`pclmix serve`: the workbench in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from pclmix.cli import app, options


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
    from pclmix.web.serve import run_server

    run_server(
        dataset,
        host=host,
        port=port,
        browser=browser,
        classes=None if classes is None else classes.split(","),
        max_upload=max_upload,
        monailabel=monailabel,
    )
