"""Inference: `load` a model, then `predict` arrays or `predict_files`."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from pclmix.errors import PclmixError, require_one_of
from pclmix.inference.predictor import About, Precision, Predictor

__all__ = ["About", "Predictor", "load"]


def load(
    path: Path | str,
    *,
    device: str = "auto",
    precision: Precision = "auto",
    batch: int | None = None,
    net: str = "net",
    last: bool = False,
) -> Predictor:
    """The predictor of MODEL: a run folder, a checkpoint, or a file of `pclmix export`, which needs no torch.

    `precision` defaults to bf16 on a GPU and 32 on a CPU; an exported file has a fixed one. `batch` is the number of
    slices in one forward pass. `net` selects one network of a method that trains several (TriMix: net, net2, net3), or
    "ensemble", the mean of their probabilities. `last` loads the last weights instead of the average.
    """
    require_one_of("precision", precision, get_args(Precision))
    if Path(path).suffix.lower() == ".onnx":
        from pclmix.inference.onnx import load_onnx

        if net != "net" or last:
            raise PclmixError(f"{path} holds one network; --net selects among those of a run folder")
        return load_onnx(path, device=device, batch=batch)
    from pclmix.inference.torch import load as load_checkpoint

    return load_checkpoint(path, device=device, precision=precision, batch=batch, net=net, last=last)
