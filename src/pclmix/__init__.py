"""pclmix: medical image segmentation from scribbles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pclmix.predict.base import Precision, Predictor

__version__ = "0.1.0"


def load(
    path: Path | str, *, device: str = "auto", precision: Precision = "auto", batch: int | None = None
) -> Predictor:
    """A trained model, ready to predict: `pclmix.load("run1").predict(array, spacing)`."""
    # Imported here: torch takes seconds, and the command line must answer --help without it.
    from pclmix.predict import load as load_model

    return load_model(path, device=device, precision=precision, batch=batch)
