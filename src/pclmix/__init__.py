"""pclmix: medical image segmentation from scribbles.

What the command line does can be typed in Python, with the same names and the same defaults:

>>> import pclmix
>>> run = pclmix.train("phantom", "run1", "engine.iterations=3", recipe="tiny", fold=1, device="cpu")
>>> model = pclmix.load(run, device="cpu")
>>> model.about.labels.names
('background', 'RV', 'Myo', 'LV')
>>> import numpy as np
>>> model.predict(np.random.rand(2, 40, 30), spacing=(8.0, 1.5, 1.5)).shape  # (Z, H, W) and millimetres
(2, 40, 30)
>>> labels = model.predict_file("phantom/imagesTr/phantom001_frame01_0000.nii.gz", "out/phantom001_frame01.nii.gz")
>>> summary = pclmix.evaluate("out", "phantom", cases=["phantom001_frame01"])
>>> summary.names
('RV', 'Myo', 'LV')

A user's mistake raises `pclmix.errors.PclmixError`, whose text says what to do.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pclmix.predict.base import Precision, Predictor

__version__ = "0.1.0"
__all__ = ["__version__", "evaluate", "load", "train"]


def load(
    path: Path | str,
    *,
    device: str = "auto",
    precision: Precision = "auto",
    batch: int | None = None,
    net: str = "net",
    offset: Mapping[str, float] | None = None,
) -> Predictor:
    """A trained model, ready to predict: a run folder, a checkpoint or an exported .onnx file.

    `pclmix.load("run1").predict(array, spacing)` gives labels, `.predict_file(image, out)` writes them,
    `.probabilities(array)` and `.examine(array)` say how sure they are. Of a method with several networks `net` is one
    of them or "ensemble"; `offset`, such as {"LV": 1.5}, is added to the scores of classes instead of the run's own.
    """
    # Imported here: torch takes seconds, and the command line must answer --help without it.
    from pclmix.predict import load as load_model

    return load_model(path, device=device, precision=precision, batch=batch, net=net, offset=offset)


def train(
    dataset: Path | str,
    out: Path | str,
    *overrides: str,
    method: str | None = None,
    recipe: str | None = None,
    fold: int | None = None,
    resume: bool = False,
    device: str = "auto",
    devices: int = 1,
    nodes: int = 1,
) -> Path:
    """Train on the scribbles of a dataset as `pclmix train` does, and return the run folder, which `load` takes.

    `overrides` are settings such as "optim.lr=0.01". Ctrl-C saves and then raises KeyboardInterrupt: call again with
    `resume=True` to go on.
    """
    from pclmix.engine.start import run_training

    finished = run_training(
        Path(dataset),
        Path(out),
        method=method,
        recipe=recipe,
        overrides=overrides,
        fold=fold,
        resume=resume,
        device=device,
        devices=devices,
        nodes=nodes,
    )
    if not finished:
        raise KeyboardInterrupt
    return Path(out)


def __getattr__(name: str) -> Any:
    """`pclmix.evaluate` is the package of that name, loaded when first asked for; calling it evaluates."""
    if name == "evaluate":
        return importlib.import_module("pclmix.evaluate")
    raise AttributeError(f"module 'pclmix' has no attribute '{name}'")
