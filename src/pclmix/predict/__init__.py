"""From a trained model to label maps: `load` a model, then `predict` arrays or `predict_files`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from pclmix.errors import PclmixError, require_one_of
from pclmix.predict.base import About, Precision, Predictor

__all__ = ["About", "Predictor", "load"]


def load(
    path: Path | str,
    *,
    device: str = "auto",
    precision: Precision = "auto",
    batch: int | None = None,
    net: str = "net",
    last: bool = False,
    offset: Mapping[str, float] | None = None,
) -> Predictor:
    """The predictor of MODEL: a run folder, a checkpoint, or a file of `pclmix export`, which needs no torch.

    `precision` is bf16 on a GPU and 32 on a CPU unless said (an exported file has its own); `batch` is the number of
    slices at once. `net` chooses among the networks of a method that trains several (TriMix: net, net2, net3, or
    ensemble for their mean); `last` takes the last weights where the run kept an average; `offset` such
    as {"LV": 1.5} is added to the scores of classes, instead of the run's own.
    """
    require_one_of("precision", precision, get_args(Precision))
    if Path(path).suffix.lower() == ".onnx":
        from pclmix.predict.onnx import load_onnx

        if net != "net" or last:
            raise PclmixError(f"{path} holds one network; --net chooses among those of a run folder")
        if offset is not None:
            raise PclmixError(f"{path} has its offset built in; --offset is for a run folder or a checkpoint")
        return load_onnx(path, device=device, batch=batch)
    from pclmix.predict.model import load as load_checkpoint

    return load_checkpoint(path, device=device, precision=precision, batch=batch, net=net, last=last, offset=offset)
