"""pclmix: medical image segmentation from scribbles.

The Python interface has the names and defaults of the command line:

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

>>> pclmix.metrics.dice(labels == 0, labels == 0)
1.0

Invalid input raises `pclmix.PclmixError`; the message says how to fix it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pclmix._version import __version__
from pclmix.errors import PclmixError

if TYPE_CHECKING:
    from pclmix import metrics
    from pclmix.inference.predictor import Precision, Predictor
    from pclmix.metrics import Summary

__all__ = ["PclmixError", "__version__", "evaluate", "load", "metrics", "train"]


def __getattr__(name: str) -> Any:
    """Import `pclmix.metrics` on first use: NumPy and SciPy cost the command line half a second."""
    if name == "metrics":
        return import_module("pclmix.metrics")
    raise AttributeError(f"module 'pclmix' has no attribute '{name}'")


def load(
    path: Path | str,
    *,
    device: str = "auto",
    precision: Precision = "auto",
    batch: int | None = None,
    net: str = "net",
) -> Predictor:
    """Load a trained model: a run folder, a checkpoint or an exported .onnx file.

    `pclmix.load("run1").predict(image)` returns labels in the spatial shape of the image, which is a path or an array
    (H, W), (H, W, C), (Z, H, W) or (C, Z, H, W). `.predict_file(image, out)` writes them, `.probabilities(image)` and
    `.examine(image)` say how certain they are.

    Args:
        path: A run folder, a checkpoint or an exported file.
        device: "cpu", "cuda" or "auto", which is a GPU if there is one.
        precision: "32", "bf16" or "auto", which is bf16 on a GPU.
        batch: Slices that go through the network at once; the default fits the device.
        net: One network of a method that trains several, by name, or "ensemble" for their mean.
    """
    # Imported here: importing torch takes seconds, and --help must not need it.
    from pclmix.inference import load as load_model

    return load_model(path, device=device, precision=precision, batch=batch, net=net)


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
    minutes: float | None = None,
    start_from: Path | str | None = None,
) -> Path:
    """Train on the scribbles of a dataset as `pclmix train` does, and return the run folder, which `load` takes.

    Ctrl-C saves a checkpoint and then raises KeyboardInterrupt; call again with `resume=True` to continue.

    Args:
        dataset: A folder with dataset.json.
        out: The run folder, which must not exist yet unless `resume` is set.
        *overrides: Settings such as "optim.lr=0.01"; `pclmix config` lists them.
        method: A name that `pclmix methods` lists; pclmix by default.
        recipe: A recipe's name or a YAML file. Without one the settings are planned from the data.
        fold: The fold, from 1, whose test cases are left out; None trains on all cases.
        resume: Continue the run in `out`, or start it.
        device: "cpu", "cuda" or "auto", which is a GPU if there is one.
        devices: GPUs, or processes on a CPU, per node.
        nodes: Nodes under torchrun.
        minutes: Time from the call to the finished run; 5 without a recipe.
        start_from: A run whose weights are used, with classes matched by name.
    """
    started = time.time()  # before torch is imported
    from pclmix.report.training import draw_run
    from pclmix.training.request import TrainRequest
    from pclmix.training.start import run_training

    request = TrainRequest(
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
        minutes=minutes,
        start_from=None if start_from is None else Path(start_from),
        started=started,
    )
    if not run_training(request):
        raise KeyboardInterrupt
    draw_run(request.out)
    return Path(out)


def evaluate(
    prediction: Path | str,
    reference: Path | str,
    *,
    cases: Sequence[str] | None = None,
    fold: int | None = None,
    against: Path | str | None = None,
    largest_component: bool = False,
    ignore_headers: bool = False,
    workers: int = 2,
) -> Summary:
    """Score predictions, files or folders, against references or a dataset, matched by case name.

    Args:
        prediction: A label map or a folder of them.
        reference: A dense mask, a folder of them or a dataset.
        cases: Expected cases. `Summary.missing` lists those without a prediction, which are in no mean.
        fold: Expect the test cases of this fold of the dataset.
        against: Another folder of predictions, or an evaluation's JSON or CSV; `Summary.against` then holds the
            differences with intervals.
        largest_component: Keep the largest 3-D component of each class first.
        ignore_headers: Compare arrays of one shape although their headers differ.
        workers: Threads that read and score cases.
    """
    from pclmix.metrics.run import evaluate as evaluate_predictions

    return evaluate_predictions(
        prediction,
        reference,
        cases=cases,
        fold=fold,
        against=against,
        largest_component=largest_component,
        ignore_headers=ignore_headers,
        workers=workers,
    )
