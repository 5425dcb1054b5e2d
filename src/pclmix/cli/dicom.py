"""`pclmix dicom`: a DICOM series as NIfTI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pclmix.cli import app


@app.command(epilog="Example: pclmix dicom scans/series7 images/patient7_0000.nii.gz")
def dicom(
    series: Annotated[Path, typer.Argument(metavar="SERIES", help="A folder with the slices of one series.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .nii.gz file to write.")],
) -> None:
    """Convert a DICOM series to NIfTI with its geometry, to draw scribbles on it or to train with it.

    A folder with two series, or with several images of one position, is refused. `pclmix predict` takes the folder as
    it is.
    """
    from pclmix.data.dicom import convert_series

    shape, spacing = convert_series(series, out)
    sizes = " x ".join(str(n) for n in shape)
    typer.echo(f"{out}: {sizes} (Z, H, W), {' x '.join(f'{s:.4g}' for s in spacing)} mm")
