"""Predicts with models exported by pclmix: onnxruntime, NumPy and nibabel, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pclmix_runtime._version import __version__ as __version__

if TYPE_CHECKING:
    from pclmix_runtime.inference.predictor import Predictor


def load(path: Path | str, *, device: str = "auto", batch: int | None = None) -> Predictor:
    """The predictor of an exported file: `load("heart.onnx").predict(array, spacing)`."""
    from pclmix_runtime.errors import PclmixError
    from pclmix_runtime.inference.onnx import load_onnx

    if Path(path).suffix.lower() != ".onnx":
        raise PclmixError(f"{path} is not an .onnx file; `pclmix export` makes one from a run or a checkpoint")
    return load_onnx(path, device=device, batch=batch)
