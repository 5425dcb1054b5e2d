"""What a finished run leaves for a person: loss curves, example predictions, agreement with each case's scribbles."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pclmix.data.store import Store
from pclmix.engine.checkpoint import LAST, build_net, load_checkpoint
from pclmix.engine.runlog import read_metrics
from pclmix.engine.validate import agreement
from pclmix.files import atomic_path
from pclmix.labels import IGNORE, Labels
from pclmix.losses.uncertainty import entropy
from pclmix.nets.segmenter import Segmenter

LOSSES, EXAMPLES, CASES = "losses.png", "examples.png", "training_cases.csv"


def finish_run(run: Path, labels: Labels, store: Store, device: torch.device) -> None:
    """Write losses.png, examples.png and training_cases.csv from the last checkpoint and the training slices."""
    net = build_net(load_checkpoint(run / LAST, lazy=True)).to(device)
    _write_cases(run / CASES, agreement(net, store, device, labels.count), store, labels)
    _plot_losses(run)
    _plot_examples(run, net, store, labels, device)


def _write_cases(path: Path, counts: torch.Tensor, store: Store, labels: Labels) -> None:
    """Per training case and class: scribbled pixels, and the share of them that the network predicts alike."""
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["case", *(f"{n}_{what}" for n in labels.names for what in ("pixels", "agreement"))])
        for case, table in zip(store.cases, counts, strict=True):
            drawn, right = table.sum(1), table.diagonal()
            cells = [(int(d), f"{float(r / d):.4f}" if d else "") for d, r in zip(drawn, right, strict=True)]
            writer.writerow([case, *(value for pair in cells for value in pair)])


def _plot_losses(run: Path) -> None:
    lines = read_metrics(run)
    names = [n for n in (lines[-1] if lines else {}) if n.startswith("loss")]
    if not names:
        return
    figure, axes = _figure(1, len(names), 3.2, 2.4)
    for axis, name in zip(axes.flat, names, strict=True):
        points = [(line["step"], line[name]) for line in lines if name in line]
        axis.plot(*zip(*points, strict=True), linewidth=1.0, color="#0072b2")
        axis.set_title(name.removeprefix("loss/") if name != "loss" else "total loss", fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    _save(figure, run / LOSSES)


def _plot_examples(run: Path, net: Segmenter, store: Store, labels: Labels, device: torch.device) -> None:
    """Six slices with scribbles, spread over the cases: image, scribble, prediction, uncertainty."""
    drawn = np.flatnonzero((store.labels[:, 0] != IGNORE).any(axis=(1, 2)))
    chosen = drawn[np.linspace(0, len(drawn) - 1, num=min(6, len(drawn))).astype(int)]
    image = torch.from_numpy(np.array(store.images[chosen])).float()
    with torch.no_grad():
        probabilities = net(image.to(device)).float().softmax(1).cpu()
    predicted, uncertainty = probabilities.argmax(1).numpy(), entropy(probabilities).numpy()
    figure, axes = _figure(4, len(chosen), 1.9, 1.9)
    for column, place in enumerate(chosen):
        grey = image[column, 0].numpy()
        scribble = store.labels[place, 0]
        panels = [
            ("image", grey, None),
            ("scribble", grey, np.where(scribble > IGNORE, scribble + 1, 0)),
            ("prediction", grey, np.where(predicted[column] > 0, predicted[column] + 1, 0)),
        ]
        for row, (title, base, overlay) in enumerate(panels):
            _panel(axes[row, column], title if column == 0 else "", base, overlay, labels)
        axes[3, column].imshow(uncertainty[column], cmap="magma", vmin=0, vmax=float(np.log(2)))
        axes[3, column].set_ylabel("uncertainty" if column == 0 else "", fontsize=9)
        axes[0, column].set_title(store.cases[store.case_of[place]], fontsize=7)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    _save(figure, run / EXAMPLES)


def _panel(axis: Any, title: str, base: Any, overlay: Any, labels: Labels) -> None:
    from matplotlib.colors import ListedColormap

    axis.imshow(base, cmap="gray", vmin=0, vmax=1)
    axis.set_ylabel(title, fontsize=9)
    if overlay is not None:
        # Value 0 is transparent; class k is drawn as k + 1, and a drawn background in a colour that can be seen.
        colours = ["#00000000", "#999999", *labels.colours()[1:]]
        axis.imshow(
            overlay, cmap=ListedColormap(colours), vmin=0, vmax=len(colours) - 1, alpha=0.6, interpolation="nearest"
        )


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (width * columns, height * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110)
    plt.close(figure)
