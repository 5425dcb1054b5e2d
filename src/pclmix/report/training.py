"""Pictures of one finished training, from the files of its run folder: loss curves and example predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pclmix.io.files import atomic_path, sweep_folder
from pclmix.labels import IGNORE, Labels
from pclmix.report import figures
from pclmix.report.figures import smooth, style
from pclmix.training.log import read_metrics
from pclmix.training.scores import EXAMPLES

LOSSES, PICTURES = "losses.png", "examples.png"


def draw_run(run: Path) -> None:
    """Write RUN/losses.png and RUN/examples.png, unless they exist."""
    sweep_folder(run, {LOSSES, PICTURES}, older=600)  # of a command killed while it drew
    for name, draw in ((LOSSES, _losses), (PICTURES, _examples)):
        if (run / name).is_file():
            continue
        figure = draw(run)
        if figure is not None:
            with style(), atomic_path(run / name) as temporary:
                figure.savefig(temporary)


def _losses(run: Path) -> Any:
    """The total loss and each of its terms over training, raw and smoothed; None where nothing was logged."""
    from matplotlib.figure import Figure

    lines = read_metrics(run)
    names = list(dict.fromkeys(name for line in lines for name in line if name.startswith("loss")))
    if not names:
        return None
    with style():
        figure = Figure(figsize=(3.2 * len(names), 2.4))
        for axis, name in zip(figure.subplots(1, len(names), squeeze=False).flat, names, strict=True):
            steps, values = zip(*((line["step"], line[name]) for line in lines if name in line), strict=True)
            axis.plot(steps, values, color="C1", linewidth=0.8)
            axis.plot(steps, smooth(values), color="C0")
            axis.set_title(name.removeprefix("loss/") if name != "loss" else "total loss")
            axis.set_xlabel("step")
    return figure


def _examples(run: Path) -> Any:
    """A column for each training slice of examples.npz: image, scribble, prediction, entropy; None without the file."""
    from matplotlib.figure import Figure

    if not (run / EXAMPLES).is_file():
        return None
    with np.load(run / EXAMPLES, allow_pickle=False) as content:
        data = {name: content[name] for name in content.files}
    names = Labels(tuple(map(str, data["classes"])), None)
    rows = ("image", "scribble", "prediction", "uncertainty")
    with style():
        figure = Figure(figsize=(1.9 * len(data["cases"]), 1.9 * len(rows)))
        axes = figure.subplots(len(rows), len(data["cases"]), squeeze=False)
        for column, case in enumerate(data["cases"]):
            planes = np.atleast_3d(data["image"][column].astype(np.float32).T).T
            image = np.stack([figures.enlarge(plane) for plane in planes] * (3 // len(planes)), axis=2)
            predicted = np.where(data["prediction"][column] > 0, data["prediction"][column], IGNORE)
            cells = [
                image,
                figures.paint(image, data["scribble"][column], names, 1.0),
                figures.paint(image, predicted, names),
                figures.heat(data["entropy"][column].astype(np.float32)),
            ]
            for row, cell in enumerate(cells):
                axes[row, column].imshow(np.clip(cell, 0, 1))
                axes[row, column].set_xticks([])
                axes[row, column].set_yticks([])
                axes[row, column].set_ylabel(rows[row] if column == 0 else "")
            axes[0, column].set_title(str(case), fontsize=7)
    return figure
