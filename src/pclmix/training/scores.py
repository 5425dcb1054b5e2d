"""Agreement of a network with scribbles, and the results of a finished run. No dense mask is opened."""

from __future__ import annotations

import csv
import math
import time
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pclmix.data.dataset import Dataset
from pclmix.data.preprocess import gaussian, slide
from pclmix.data.store import Store
from pclmix.io.files import atomic_path
from pclmix.labels import IGNORE, Labels
from pclmix.losses.unlabelled import entropy
from pclmix.methods.base import Method
from pclmix.nets.segmenter import Segmenter
from pclmix.training.checkpoint import LAST, build_net, load_checkpoint

CASES, EXAMPLES = "training_cases.csv", "examples.npz"
_EXAMPLES = 6
_TIMED = {"cpu": 2, "cuda": 16}  #: slices predicted to measure the time of a slice
SLICES = 500  #: slices predicted on a CPU at the end of a run
_PIXELS = 2**20  #: pixels predicted at once, in whole slices
Patch = tuple[int, int] | None  #: patch size, unless whole slices are used


@torch.no_grad()
def agreement(
    net: nn.Module,
    store: Store,
    device: torch.device,
    classes: int,
    patch: Patch = None,
    batch: int = 16,
    most: int | None = None,
) -> Tensor:
    """Counts (cases, K, K): scribbled class by predicted class, in float64. The network's mode is restored.

    With `most` only so many scribbled slices, evenly spread, are predicted.
    """
    training = net.training
    net.eval()
    counts = torch.zeros(len(store.cases), classes * classes, dtype=torch.float64)
    looked_at = _looked_at(store, device, most)
    batch = max(1, min(batch, _PIXELS // math.prod(store.images.shape[2:])))
    for first in range(0, len(looked_at), batch):
        chosen = looked_at[first : first + batch]
        image = torch.from_numpy(np.array(store.images[chosen])).float().to(device)
        label = torch.from_numpy(np.array(store.labels[chosen, 0])).long()
        predicted = _scores(net, image, patch).argmax(1).cpu()
        pair = torch.where(label != IGNORE, label * classes + predicted, classes * classes)
        for case, row in zip(store.case_of[chosen], pair, strict=True):
            counts[case] += torch.bincount(row.flatten(), minlength=classes * classes + 1)[:-1]
    net.train(training)
    return counts.view(-1, classes, classes)


def _scores(net: nn.Module, image: Tensor, patch: Patch) -> Tensor:
    """Logits of whole slices, by a sliding window for patch-based networks."""
    if patch is None:
        logits: Tensor = net(image)
        return logits
    zeros, weight = partial(torch.zeros, device=image.device), torch.tensor(gaussian(patch), device=image.device)
    slid: Tensor = slide(lambda part: net(part).float(), image, patch, zeros, weight)
    return slid


@torch.no_grad()
def slices_within(
    seconds: float, method: Method, store: Store, device: torch.device, patch: Patch
) -> tuple[int, float]:
    """The number of slices that `write_results` can predict within `seconds`, and the time that it takes.

    Measured on the first slices. The number is at least that of the examples.
    """
    count = min(_TIMED[device.type] if patch is None else 1, len(store))
    net = method.net.eval()
    image = torch.from_numpy(np.array(store.images[:count])).float().to(device)
    for _ in range(2):
        started = time.perf_counter()
        _scores(net, image, patch).argmax(1).cpu()
    method.net.train()
    each = (time.perf_counter() - started) / count
    most = min(len(_looked_at(store, device)), max(_EXAMPLES, int(seconds / each)))
    return most, each * (most + _EXAMPLES)


def _looked_at(store: Store, device: torch.device, most: int | None = None) -> npt.NDArray[np.int64]:
    """The scribbled slices; at most `most`, and on a CPU at most SLICES of them, evenly spread."""
    drawn = np.flatnonzero((store.labels[:, 0] != IGNORE).any(axis=(1, 2)))
    most = min(SLICES if device.type == "cpu" else len(drawn), len(drawn) if most is None else most)
    if len(drawn) <= most:
        return drawn
    spread: npt.NDArray[np.int64] = drawn[np.linspace(0, len(drawn) - 1, most).round().astype(int)]
    return spread


def scribble_scores(method: Method, store: Store, device: torch.device, patch: Patch = None) -> dict[str, float]:
    """`validation/recall`: the share of scribbled pixels predicted correctly, averaged over the scribbled classes."""
    counts = agreement(method.net, store, device, method.task.classes, patch).sum(0)
    drawn = counts.sum(1)
    recall = counts.diagonal()[drawn > 0] / drawn[drawn > 0]
    return {"validation/recall": float(recall.mean())}


def write_results(run: Path, dataset: Dataset, store: Store, device: torch.device, most: int | None = None) -> None:
    """Write training_cases.csv and examples.npz from the last checkpoint and the training slices, at most `most`."""
    checkpoint, labels = load_checkpoint(run / LAST, lazy=True), dataset.labels
    net, patch = build_net(checkpoint).to(device), checkpoint.config.data.patch
    _write_cases(run / CASES, agreement(net, store, device, labels.count, patch, most=most), store, labels)
    _write_examples(run / EXAMPLES, net, store, dataset, device, patch)


def _write_cases(path: Path, counts: Tensor, store: Store, labels: Labels) -> None:
    """Per training case and class: scribbled pixels used, and the share predicted correctly."""
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["case", *(f"{n}_{what}" for n in labels.names for what in ("pixels", "agreement"))])
        for case, table in zip(store.cases, counts, strict=True):
            drawn, right = table.sum(1), table.diagonal()
            cells = [(int(d), f"{float(r / d):.4f}" if d else "") for d, r in zip(drawn, right, strict=True)]
            writer.writerow([case, *(value for pair in cells for value in pair)])


def _write_examples(
    path: Path, net: Segmenter, store: Store, dataset: Dataset, device: torch.device, patch: Patch
) -> None:
    """A few scribbled slices, spread over the cases, for the figure of a run: image, scribble, prediction, entropy.

    Images are (n, H, W), the first channel, or (n, 3, H, W) of colour pictures.
    """
    drawn = np.flatnonzero((store.labels[:, 0] != IGNORE).any(axis=(1, 2)))
    chosen = drawn[np.linspace(0, len(drawn) - 1, num=min(_EXAMPLES, len(drawn))).astype(int)]
    predicted, uncertain = [], []
    for place in chosen:  # one by one: large slices take much memory
        image = torch.from_numpy(np.array(store.images[place])).float()[None].to(device)
        with torch.no_grad():
            probability = _scores(net, image, patch).float().softmax(1).cpu()
        predicted.append(probability.argmax(1)[0].to(torch.int16).numpy())
        uncertain.append(entropy(probability)[0].half().numpy())
    with atomic_path(path) as temporary:
        np.savez_compressed(
            temporary,
            image=np.array(store.images[chosen] if dataset.is_colour else store.images[chosen, 0]),
            scribble=np.array(store.labels[chosen, 0]),
            prediction=np.stack(predicted),
            entropy=np.stack(uncertain),
            cases=np.array([store.cases[store.case_of[place]] for place in chosen]),
            classes=np.array(dataset.labels.names),
        )
