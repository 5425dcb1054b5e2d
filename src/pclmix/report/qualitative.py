"""Qualitative figure of one case: image, scribble, predictions of all runs with outlined errors, dense mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.io.volume import Volume, read_labels
from pclmix.labels import IGNORE, Labels
from pclmix.metrics.run import label_files
from pclmix.metrics.summary import AVERAGE
from pclmix.report import figures
from pclmix.report.figures import style
from pclmix.report.tables import Run

Array = npt.NDArray[Any]
SLICES = 4
ABREAST = 5  #: panels per row for pictures


@dataclass(frozen=True)
class Panel:
    """One row of the figure: a label map (Z, H, W), or None for the image alone."""

    title: str
    labels: Array | None
    is_prediction: bool = False


def median_case(run: Run, allowed: set[str]) -> str:
    """The case of median mean Dice (the lower of two), among the allowed ones."""
    values = {c: v for c, v in run.summary.by_case(AVERAGE, "Dice").items() if c in allowed and not math.isnan(v)}
    if not values:
        raise PclmixError(f"no case of '{run.name}' has an image, a scribble, a dense mask and predictions of all runs")
    order = sorted(values, key=lambda case: (values[case], case))
    return order[(len(order) - 1) // 2]


def qualitative(runs: Sequence[Run], dataset: Dataset, chosen: Run) -> tuple[Any, str]:
    """The figure of the chosen run's median case, and the name of the case."""
    shown = [run for run in runs if run.predictions is not None]
    if chosen not in shown:
        raise PclmixError(f"there are no predictions of '{chosen.name}'; keep them in RUN/predictions")
    files = {run.name: label_files(run.predictions) for run in shown if run.predictions is not None}
    allowed = {case for case in dataset.cases if dataset.has_reference(case)}.intersection(*files.values())
    case = median_case(chosen, allowed)
    truth = dataset.read_reference(case)[0]
    rows = [Panel("image", None), Panel("scribble", dataset.read_scribble(case)[0])]
    for run in shown:
        path = files[run.name][case]
        array, _ = read_labels(path)
        if array.shape != truth.shape:
            raise PclmixError(f"{path} has the shape {array.shape}, its dense mask {truth.shape} (Z, H, W)")
        dice = 100 * run.summary.by_case(AVERAGE, "Dice")[case]
        rows.append(Panel(f"{run.name}\nDice {dice:.1f}", dataset.labels.decode(array, str(path)), True))
    rows.append(Panel("dense mask", truth))
    return draw(dataset.read_image(case), truth, rows, dataset.labels), case


def draw(volume: Volume, truth: Array, rows: Sequence[Panel], labels: Labels) -> Any:
    """A row for each panel, a column for each of up to SLICES slices; the errors of predictions are outlined.

    For a picture, which has one slice, the panels are side by side.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    slices = _slices(truth)
    box = _crop(truth, rows, slices)
    cut, limits = Volume(volume.array[:, :, *box], volume.geometry), figures.window(volume)
    spacing = volume.geometry.spacing
    aspect = spacing[1] / spacing[2]
    shape = (len(rows), len(slices)) if len(slices) > 1 else (-(-len(rows) // ABREAST), min(ABREAST, len(rows)))
    width = 1.75 if len(slices) > 1 else 2.2
    cell = width * aspect * cut.array.shape[2] / cut.array.shape[3]
    with style():
        engine = ConstrainedLayoutEngine(w_pad=0.012, h_pad=0.012, wspace=0, hspace=0)
        margin, heading = (0.95, 0.0) if len(slices) > 1 else (0.0, 0.35)
        size = (margin + width * shape[1], 0.65 + (cell + heading) * shape[0])
        figure = Figure(figsize=size, layout=engine)
        axes = figure.subplots(*shape, squeeze=False)
        for ax in axes.flat:
            ax.set_axis_off()
        for row, panel in enumerate(rows):
            for column, z in enumerate(slices):
                ax = axes[row, column] if len(slices) > 1 else axes[divmod(row, ABREAST)]
                ax.imshow(_cell(figures.base(cut, z, limits), panel, z, box, truth, labels), aspect=aspect)
                if len(slices) == 1:
                    ax.set_title(
                        ", ".join(filter(None, (panel.title, figures.slice_name(z, len(truth))))), loc="center"
                    )
                elif row == 0:
                    ax.set_title(figures.slice_name(z, len(truth)), loc="center")
            if len(slices) > 1:
                place = {"transform": axes[row, 0].transAxes, "ha": "right", "va": "center", "fontsize": 9}
                axes[row, 0].text(-0.04, 0.5, panel.title, **place)
        keys = _keys(labels, any(panel.is_prediction for panel in rows))
        figure.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), 5))
    return figure


def _keys(labels: Labels, errors: bool) -> list[Any]:
    """The legend: classes, background stroke and, where predictions are shown, the outline of an error."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    named = zip(labels.colours()[1:], labels.foreground, strict=True)
    keys: list[Any] = [Patch(color=colour, label=name) for colour, name in named]
    keys.append(Patch(facecolor=figures.BACKGROUND_STROKE, edgecolor="#999999", label="background scribble"))
    if errors:
        keys.append(Line2D([], [], color=figures.ERROR, linewidth=1.6, label="outline of an error"))
    return keys


def _cell(picture: Array, panel: Panel, z: int, box: tuple[slice, slice], truth: Array, labels: Labels) -> Array:
    if panel.labels is None:
        return picture
    shown = panel.labels[z][box]
    picture = figures.paint(picture, shown, labels, 1.0 if panel.title == "scribble" else 0.6)
    if not panel.is_prediction:
        return picture
    reference = truth[z][box]
    return figures.outline(picture, (shown != reference) & (reference != IGNORE), figures.ERROR, width=2)


def _slices(truth: Array) -> list[int]:
    """Up to SLICES slices evenly among those with any foreground, or the middle one where there is none."""
    filled = np.flatnonzero((truth > 0).any(axis=(1, 2)))
    if not filled.size:
        filled = np.array([truth.shape[0] // 2])
    picks = np.linspace(0, len(filled) - 1, min(SLICES, len(filled)) + 2)[1:-1] if len(filled) > SLICES else None
    chosen = filled if picks is None else filled[np.unique(picks.round().astype(int))]
    return [int(z) for z in chosen]


def _crop(truth: Array, rows: Sequence[Panel], slices: Sequence[int]) -> tuple[slice, slice]:
    """The bounding box of everything drawn or predicted in these slices, with a margin."""
    shown = [truth, *(panel.labels for panel in rows if panel.labels is not None)]
    drawn = np.any([(array[list(slices)] > 0).any(axis=0) for array in shown], axis=0)
    if not drawn.any():
        return slice(0, truth.shape[1]), slice(0, truth.shape[2])
    box = []
    for axis in (0, 1):
        line = np.flatnonzero(drawn.any(axis=1 - axis))
        margin = max(6, round(0.15 * (line[-1] - line[0])))
        box.append(slice(max(0, int(line[0]) - margin), min(drawn.shape[axis], int(line[-1]) + 1 + margin)))
    return box[0], box[1]
