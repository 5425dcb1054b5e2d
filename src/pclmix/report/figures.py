"""Pictures of a comparison: box plots per class, and one case as every method sees it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pclmix.data.dataset import Dataset
from pclmix.data.volume import read_labels
from pclmix.errors import PclmixError
from pclmix.evaluate.cases import label_files
from pclmix.files import atomic_path
from pclmix.labels import IGNORE, Labels, palette
from pclmix.report.runs import Run
from pclmix.report.significance import AVERAGE, case_values

Array = npt.NDArray[Any]

#: Of no class of the palette and of no grey image.
ERROR_COLOUR = "#ff3df2"
INK, PALE = "#222222", "#d9d9d9"
SLICES = 4


@dataclass(frozen=True)
class Panel:
    """One row of the qualitative figure: a label map (Z, H, W) or None for the image alone."""

    title: str
    labels: Array | None
    is_prediction: bool = False


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write NAME.png and NAME.svg, text as text."""
    import matplotlib

    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        for path in paths:
            with atomic_path(path) as temporary:
                figure.savefig(temporary, dpi=160, facecolor="white", bbox_inches="tight", pad_inches=0.08)
    return paths


def boxplots(runs: Sequence[Run], *, hd95: str = "HD95_50") -> Any:
    """Two rows, Dice and HD95, a column for each class and the average; a box and the cases for each run."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    columns = (*runs[0].summary.names, AVERAGE)
    colours = [*palette(len(columns))[1:], "#666666"]
    height = 0.7 + 0.34 * len(runs)
    figure = Figure(figsize=(1.2 + 2.35 * len(columns), 2 * height + 0.6), layout="constrained")
    axes = figure.subplots(2, len(columns), sharey=True, sharex="row", squeeze=False)
    rng = np.random.default_rng(0)
    for line, (measure, title) in enumerate((("Dice", "Dice, %"), (hd95, "HD95, mm"))):
        for column, name in enumerate(columns):
            ax = axes[line, column]
            scale = 100 if measure == "Dice" else 1
            groups = [scale * _known(case_values(run.summary, name, measure)) for run in runs]
            _boxes(ax, groups, colours[column], rng)
            ax.set_xlabel(title, color=INK, fontsize=9)
            if line == 0:
                ax.set_title(name, color=INK, fontsize=11, fontweight="bold")
            else:
                ax.set_xscale("symlog", linthresh=5, linscale=0.6)
                ax.set_xlim(left=0)
                top = max((float(g.max()) for g in groups if g.size), default=10.0)
                ax.set_xticks([t for t in (0, 5, 10, 20, 50, 100, 200) if t <= max(10, 1.5 * top)])
                ax.xaxis.set_major_formatter(ScalarFormatter())
                ax.xaxis.set_minor_locator(_no_ticks())
            ax.set_yticks(range(len(runs)), [run.name for run in runs], fontsize=9)
            ax.set_ylim(len(runs) - 0.4, -0.6)
    return figure


def median_case(run: Run, allowed: set[str]) -> str:
    """The case of the middle mean Dice (the lower of two), among those allowed."""
    values = {c: v for c, v in case_values(run.summary, AVERAGE, "Dice").items() if c in allowed and not math.isnan(v)}
    if not values:
        raise PclmixError(f"no case of '{run.name}' has an image, a scribble, a dense mask and predictions of all runs")
    order = sorted(values, key=lambda case: (values[case], case))
    return order[(len(order) - 1) // 2]


def qualitative(runs: Sequence[Run], dataset: Dataset, chosen: Run) -> tuple[Any, str]:
    """Rows of image, scribble, each run and truth for the chosen run's median case; the figure and the case."""
    shown = [run for run in runs if run.predictions is not None]
    if chosen not in shown:
        raise PclmixError(f"the predictions of '{chosen.name}' are not at hand; keep them in RUN/predictions")
    files = {run.name: label_files(run.predictions) for run in shown if run.predictions is not None}
    allowed = {case for case in dataset.cases if dataset.has_reference(case)}.intersection(*files.values())
    case = median_case(chosen, allowed)
    volume = dataset.read_image(case)
    truth, grid = dataset.read_reference(case)
    panels = [Panel("image", None), Panel("scribble", dataset.read_scribble(case)[0])]
    for run in shown:
        path = files[run.name][case]
        array, _ = read_labels(path)
        if array.shape != truth.shape:
            raise PclmixError(f"{path} has the shape {array.shape}, its dense mask {truth.shape} (Z, H, W)")
        dice = 100 * case_values(run.summary, AVERAGE, "Dice")[case]
        panels.append(Panel(f"{run.name}\nDice {dice:.1f}", dataset.labels.decode(array, str(path)), True))
    panels.append(Panel("truth", truth))
    return draw_panels(volume.array[0], truth, panels, dataset.labels, grid.spacing), case


def draw_panels(
    image: Array, truth: Array, panels: Sequence[Panel], labels: Labels, spacing: tuple[float, float, float]
) -> Any:
    """A row for each panel, a column for each of up to four slices; where a prediction is wrong it is outlined."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    slices = _slices(truth)
    box = _crop(truth, panels, slices)
    high, wide = (s.stop - s.start for s in box)
    aspect = spacing[1] / spacing[2]
    width = 1.75
    cell = width * aspect * high / wide
    engine = ConstrainedLayoutEngine(w_pad=0.012, h_pad=0.012, wspace=0, hspace=0)
    figure = Figure(figsize=(0.95 + width * len(slices), 0.55 + cell * len(panels)), layout=engine)
    axes = figure.subplots(len(panels), len(slices), squeeze=False)
    low, top = np.percentile(image, (1, 99.5))
    for row, panel in enumerate(panels):
        for column, z in enumerate(slices):
            ax = axes[row, column]
            ax.imshow(image[z][box], cmap="gray", vmin=low, vmax=max(top, low + 1e-6), aspect=aspect)
            if panel.labels is not None:
                strong = 0.7 if panel.title != "scribble" else 1.0
                ax.imshow(_colour(panel.labels[z][box], labels, strong), aspect=aspect, interpolation="nearest")
            if panel.is_prediction and panel.labels is not None:
                _outline(ax, (panel.labels[z] != truth[z])[box] & (truth[z][box] != IGNORE))
            ax.set_xticks([])
            ax.set_yticks([])
            for spine in ax.spines.values():
                spine.set_visible(False)
            if row == 0:
                ax.set_title(f"slice {z + 1}", fontsize=9, color=INK)
        axes[row, 0].set_ylabel(panel.title, fontsize=9, color=INK, rotation=0, ha="right", va="center", labelpad=6)
    keys: list[Any] = [Patch(color=c, label=n) for c, n in zip(labels.colours()[1:], labels.foreground, strict=True)]
    keys.append(Patch(facecolor=PALE, edgecolor="#999999", label="background scribble"))
    if any(panel.is_prediction for panel in panels):
        keys.append(Line2D([], [], color=ERROR_COLOUR, linewidth=1.6, label="outline of an error"))
    figure.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), 5), frameon=False, fontsize=9)
    return figure


def _boxes(ax: Any, groups: Sequence[Array], colour: str, rng: np.random.Generator) -> None:
    for position, values in enumerate(groups):
        if not values.size:
            ax.text(0.5, position, "not measured", color="#888888", fontsize=8, ha="center", va="center",
                    transform=ax.get_yaxis_transform())  # fmt: skip
            continue
        ax.boxplot(
            [values], positions=[position], orientation="horizontal", widths=0.62, showfliers=False, patch_artist=True,
            boxprops={"facecolor": colour, "alpha": 0.45, "edgecolor": INK, "linewidth": 0.8},
            medianprops={"color": INK, "linewidth": 1.6},
            whiskerprops={"color": INK, "linewidth": 0.8}, capprops={"color": INK, "linewidth": 0.8},
        )  # fmt: skip
        spread = position + rng.uniform(-0.2, 0.2, values.size)
        ax.scatter(values, spread, s=7, color=colour, edgecolor=INK, linewidth=0.3, alpha=0.75, zorder=3)
    ax.grid(axis="x", color="#e6e6e6", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(length=0, labelsize=8, colors=INK)
    for side, spine in ax.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#999999")


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _known(values: dict[str, float]) -> Array:
    return np.array([v for v in values.values() if not math.isnan(v)])


def _slices(truth: Array) -> list[int]:
    """Up to SLICES slices evenly among those with any foreground, or in the middle where there is none."""
    filled = np.flatnonzero((truth > 0).any(axis=(1, 2)))
    if not filled.size:
        filled = np.array([truth.shape[0] // 2])
    picks = np.linspace(0, len(filled) - 1, min(SLICES, len(filled)) + 2)[1:-1] if len(filled) > SLICES else None
    chosen = filled if picks is None else filled[np.unique(picks.round().astype(int))]
    return [int(z) for z in chosen]


def _crop(truth: Array, panels: Sequence[Panel], slices: Sequence[int]) -> tuple[slice, slice]:
    """The box around all that is drawn or predicted in these slices, with a margin, so that no island is hidden."""
    shown = [truth, *(panel.labels for panel in panels if panel.labels is not None)]
    drawn = np.any([(array[list(slices)] > 0).any(axis=0) for array in shown], axis=0)
    if not drawn.any():
        return slice(0, truth.shape[1]), slice(0, truth.shape[2])
    box = []
    for axis in (0, 1):
        line = np.flatnonzero(drawn.any(axis=1 - axis))
        margin = max(6, round(0.15 * (line[-1] - line[0])))
        box.append(slice(max(0, int(line[0]) - margin), min(drawn.shape[axis], int(line[-1]) + 1 + margin)))
    return box[0], box[1]


def _colour(labels: Array, names: Labels, alpha: float) -> Array:
    """(H, W) to RGBA: classes in their colours, background only where it is a stroke among IGNORE."""
    from matplotlib.colors import to_rgb

    out = np.zeros((*labels.shape, 4))
    for k, colour in enumerate(names.colours()):
        if k > 0:
            out[labels == k] = (*to_rgb(colour), alpha)
    if (labels == IGNORE).any():
        out[labels == 0] = (*to_rgb(PALE), alpha)
    return out


def _outline(ax: Any, wrong: Array) -> None:
    """A line along the pixel edges of a region (H, W)."""
    from matplotlib.collections import LineCollection

    padded = np.pad(wrong, 1).astype(np.int8)
    across = np.argwhere(np.diff(padded, axis=1)[1:-1])  # (y, x): an edge on the left of pixel x
    along = np.argwhere(np.diff(padded, axis=0)[:, 1:-1])
    lines = [[(x - 0.5, y - 0.5), (x - 0.5, y + 0.5)] for y, x in across]
    lines += [[(x - 0.5, y - 0.5), (x + 0.5, y - 0.5)] for y, x in along]
    ax.add_collection(LineCollection(lines, colors=ERROR_COLOUR, linewidths=0.8, capstyle="projecting"))
