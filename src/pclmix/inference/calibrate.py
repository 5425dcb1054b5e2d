"""Temperature scaling: fit one temperature per run to scribbles that training did not use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar

from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.inference.inputs import require_same_task
from pclmix.inference.torch import CALIBRATION, TorchPredictor, load
from pclmix.io.files import atomic_path, write_json
from pclmix.labels import IGNORE
from pclmix.training.checkpoint import TrainedOn, open_model

Array = npt.NDArray[Any]
DIAGRAM = "reliability.png"
BINS = 15
_RANGE = (0.05, 20.0)  # of temperatures searched


@dataclass(frozen=True)
class Pixels:
    """Scribbled pixels of some cases: logits (N, K) per decoder, class (N,), index of the case (N,)."""

    logits: tuple[Array, ...]
    label: Array
    case: Array

    def of(self, chosen: Array) -> Pixels:
        return Pixels(tuple(logits[chosen] for logits in self.logits), self.label[chosen], self.case[chosen])


def calibrate(
    run: Path | str,
    data: Path | str,
    *,
    device: str = "auto",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Fit the temperature of a run to scribbles of DATASET that it was not trained on.

    Never uses the test cases of the run's own fold. Writes calibration.json, which `load` reads, and reliability.png
    into the run folder; returns the content of calibration.json. Figures after calibration are cross-fitted: each half
    of the cases is scored with the temperature of the other half, if there are at least two cases.
    """
    run = Path(run)
    if not run.is_dir():
        raise PclmixError(f"{run} is not a run folder; the temperature is stored in the folder of `pclmix train`")
    target = run / CALIBRATION
    if target.exists() and not overwrite:
        raise PclmixError(f"{target} exists already; give --overwrite to calibrate again")
    predictor = load(run, device=device, precision="32")
    dataset = Dataset.open(Path(data))
    require_same_task(dataset, predictor.about.channels, predictor.about.labels)
    cases = held_out(dataset, open_model(run).run)
    pixels = collect(predictor, dataset, cases, progress)
    weight = predictor.second.lambda_t if predictor.second is not None else 0.0
    cnn = Pixels(pixels.logits[:1], pixels.label, pixels.case)
    report: dict[str, Any] = {
        "identity": predictor.about.identity,
        "temperature": fit(cnn, 0.0),
        "mean_temperature": fit(pixels, weight) if len(pixels.logits) > 1 else None,
        "dataset": dataset.name,
        "cases": list(cases),
        "pixels": len(pixels.label),
    }
    plots = []
    for name, chosen, share in (("cnn", cnn, 0.0), ("mean", pixels, weight))[: len(pixels.logits)]:
        before, after = probabilities(chosen, 1.0, share), cross_fitted(chosen, share)
        report[name] = {"before": figures(before, pixels.label), "after": figures(after, pixels.label)}
        plots.append((name, reliability(before, pixels.label), reliability(after, pixels.label), report[name]))
    _plot(run / DIAGRAM, plots)
    write_json(target, report)
    return report


def held_out(dataset: Dataset, run: TrainedOn) -> tuple[str, ...]:
    """Cases that are neither training nor test cases of the run; all cases of another dataset."""
    if dataset.name != run.dataset:
        return dataset.cases
    test = set(dataset.fold(run.fold).test) if run.fold is not None else set()
    cases = tuple(case for case in dataset.cases if case not in test and case not in run.cases)
    if not cases:
        raise PclmixError(
            f"the run was trained on every case of {dataset.root} outside its test fold, so none is left to calibrate "
            "on; train with data.validation=0.1, or give another dataset with scribbles"
        )
    return cases


def collect(
    predictor: TorchPredictor,
    dataset: Dataset,
    cases: Sequence[str],
    progress: Callable[[int, int], None] | None = None,
) -> Pixels:
    """Logits of the scribbled pixels of these cases, at the images' own size."""
    parts: list[tuple[Array, ...]] = []
    labels, numbers = [], []
    for number, case in enumerate(cases):
        image, (scribble, _) = dataset.read_image(case).array, dataset.read_scribble(case)
        drawn = scribble != IGNORE
        logits = predictor.native_logits(image)
        parts.append(tuple(np.moveaxis(one, 1, -1)[drawn] for one in logits))
        labels.append(scribble[drawn].astype(np.int64))
        numbers.append(np.full(int(drawn.sum()), number))
        if progress is not None:
            progress(number + 1, len(cases))
    label = np.concatenate(labels)
    if not label.size:
        raise PclmixError(f"{dataset.root}: none of the {len(cases)} cases to calibrate on has a scribble")
    return Pixels(tuple(np.concatenate(one) for one in zip(*parts, strict=True)), label, np.concatenate(numbers))


def probabilities(pixels: Pixels, temperature: float, lambda_t: float) -> Array:
    """(N, K): softmax of logits / T, both decoders averaged as in equation 6 where there are two."""
    parts = []
    for logits in pixels.logits:
        scaled = logits.astype(np.float64) / temperature
        powers = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        parts.append(powers / powers.sum(axis=1, keepdims=True))
    mixed: Array = parts[0] if len(parts) == 1 else (1 - lambda_t) * parts[0] + lambda_t * parts[1]
    return mixed


def fit(pixels: Pixels, lambda_t: float) -> float:
    """The temperature with the smallest negative log likelihood of the scribbles."""

    def loss(log_temperature: float) -> float:
        return log_loss(probabilities(pixels, float(np.exp(log_temperature)), lambda_t), pixels.label)

    found = minimize_scalar(loss, bounds=tuple(np.log(_RANGE)), method="bounded", options={"xatol": 1e-3})
    return float(np.exp(found.x))


def cross_fitted(pixels: Pixels, lambda_t: float) -> Array:
    """Calibrated probabilities (N, K), each case with a temperature fitted to other cases."""
    odd = pixels.case % 2 == 1
    if not odd.any():
        return probabilities(pixels, fit(pixels, lambda_t), lambda_t)
    result = np.empty_like(probabilities(pixels, 1.0, lambda_t))
    for half in (odd, ~odd):
        result[half] = probabilities(pixels.of(half), fit(pixels.of(~half), lambda_t), lambda_t)
    return result


def log_loss(p: Array, label: Array) -> float:
    return float(-np.log(p[np.arange(len(label)), label] + 1e-12).mean())


def reliability(p: Array, label: Array, bins: int = BINS) -> Array:
    """(3, bins): number of pixels, mean confidence and accuracy per bin of confidence, the largest probability."""
    confidence, right = p.max(axis=1), p.argmax(axis=1) == label
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    counts = np.bincount(place, minlength=bins)
    sums = [np.bincount(place, weights=w, minlength=bins) for w in (confidence, right)]
    return np.stack([counts, *(s / np.maximum(counts, 1) for s in sums)])


def figures(p: Array, label: Array) -> dict[str, float]:
    """Expected calibration error (mean gap between confidence and accuracy over BINS bins), log loss, accuracy."""
    counts, confidence, accuracy = reliability(p, label)
    gap = float((counts * np.abs(confidence - accuracy)).sum() / counts.sum())
    return {"ece": gap, "nll": log_loss(p, label), "accuracy": float((p.argmax(axis=1) == label).mean())}


def _plot(path: Path, plots: Sequence[tuple[str, Array, Array, dict[str, dict[str, float]]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(plots), 2, figsize=(7, 3.4 * len(plots)), squeeze=False, layout="constrained")
    titles = {"cnn": "CNN decoder", "mean": "both decoders"}
    for row, (name, *tables, numbers) in zip(axes, plots, strict=True):
        for axis, when, (counts, _, accuracy) in zip(row, ("before", "after"), tables, strict=True):
            edges = np.arange(len(counts)) / len(counts)
            heights = np.where(counts > 0, accuracy, 0.0)
            axis.bar(edges, heights, width=1 / len(counts), align="edge", color="#56b4e9", edgecolor="white")
            axis.plot([0, 1], [0, 1], color="#333333", linewidth=1)
            axis.set_title(f"{titles[name]}, {when}: ECE {100 * numbers[when]['ece']:.2f} %", fontsize=9)
            axis.set_xlabel("confidence", fontsize=8)
            axis.set_ylabel("accuracy", fontsize=8)
            axis.tick_params(labelsize=8)
            axis.set_xlim(0, 1)
            axis.set_ylim(0, 1)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110)
    plt.close(figure)
