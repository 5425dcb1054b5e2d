"""Figures: box plots, loss curves, and slices as pictures with labels, outlines and uncertainty over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from pclmix.io.files import atomic_path
from pclmix.io.volume import Volume
from pclmix.labels import IGNORE, Labels, palette
from pclmix.metrics.summary import AVERAGE
from pclmix.report.tables import Run, unit_of

Array = npt.NDArray[Any]
INK, SOFT = "#1c2430", "#5b6675"


def style() -> AbstractContextManager[None]:
    """Context in which figures are drawn and saved in the project's style."""
    import matplotlib.style

    context: AbstractContextManager[None] = matplotlib.style.context(Path(__file__).with_name("pclmix.mplstyle"))
    return context


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write NAME.png and NAME.svg, on white."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with style():
        for path in paths:
            with atomic_path(path) as temporary:
                figure.savefig(temporary)
    return paths


def boxplots(runs: Sequence[Run], *, hd95: str = "HD95_50") -> Any:
    """Two rows, Dice and HD95, a column for each class and the average; a box and the cases for each run."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, ScalarFormatter

    columns = (*runs[0].summary.names, AVERAGE)
    colours = [*palette(len(columns))[1:], SOFT]
    height = 0.7 + 0.34 * len(runs)
    rng = np.random.default_rng(0)
    with style():
        figure = Figure(figsize=(1.2 + 2.35 * len(columns), 2 * height + 0.6))
        axes = figure.subplots(2, len(columns), sharey=True, sharex="row", squeeze=False)
        for line, (measure, title) in enumerate((("Dice", "Dice, %"), (hd95, f"HD95, {unit_of(runs)}"))):
            for column, name in enumerate(columns):
                ax = axes[line, column]
                scale = 100 if measure == "Dice" else 1
                groups = [scale * _known(run.summary.by_case(name, measure)) for run in runs]
                _boxes(ax, groups, colours[column], rng)
                ax.set_xlabel(title)
                if line == 0:
                    ax.set_title(name, fontsize=11, fontweight="bold", loc="center")
                else:
                    ax.set_xscale("symlog", linthresh=5, linscale=0.6)
                    ax.set_xlim(left=0)
                    top = max((float(g.max()) for g in groups if g.size), default=10.0)
                    ax.set_xticks([t for t in (0, 5, 10, 20, 50, 100, 200) if t <= max(10, 1.5 * top)])
                    ax.xaxis.set_major_formatter(ScalarFormatter())
                    ax.xaxis.set_minor_locator(NullLocator())
                ax.set_yticks(range(len(runs)), [run.name for run in runs], fontsize=9)
                ax.set_ylim(len(runs) - 0.4, -0.6)
    return figure


def variants(runs: Sequence[Run]) -> Any:
    """Mean Dice and HD95 of every class and of all, over the variants of a study in their order."""
    from matplotlib.figure import Figure

    names = runs[0].summary.names
    with style():
        figure = Figure(figsize=(2.5 + 1.3 * len(runs), 6.2))
        panels: Any = figure.subplots(2, 1, sharex=True)
        for axis, measure, scale, title in (
            (panels[0], "Dice", 100.0, "Dice (%), higher is better"),
            (panels[1], "HD95_50", 1.0, f"HD95 ({unit_of(runs)}), lower is better"),
        ):
            for name, colour in zip(names, palette(len(names) + 1)[1:], strict=True):
                values = [scale * run.summary.of_class(name, measure).mean for run in runs]
                axis.plot(values, "o-", color=colour, label=name)
            means = [scale * run.summary.mean(measure).mean for run in runs]
            axis.plot(means, "s-", color=INK, label="mean", linewidth=2.2)
            axis.set_title(title, fontsize=10)
        panels[1].set_yscale("log")
        panels[1].set_xticks(range(len(runs)), [run.name for run in runs], rotation=20, ha="right", fontsize=9)
        panels[0].legend(ncols=len(names) + 1)
    return figure


def loss_curve(steps: Sequence[float], values: Sequence[float], title: str) -> Any:
    """One loss over training: raw values faint, their running mean on top."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    calm = smooth(values)
    # The axis follows the running mean; outliers are cut off.
    low, high = min(calm), max(calm)
    margin = 0.15 * (high - low) or 0.5
    bottom = max(low - margin, 0.0) if min(values) >= 0 else low - margin
    with style():
        figure = Figure(figsize=(3.0, 1.6))
        ax = figure.subplots()
        ax.plot(steps, values, color="C1", linewidth=0.8)
        ax.plot(steps, calm, color="C0", linewidth=1.8)
        ax.set_title(title)
        ax.set_ylim(bottom, high + margin)
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(3))
        ax.grid(axis="x", visible=False)
    return figure


def smooth(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Bias-corrected exponential mean.

    >>> smooth([1.0, 1.0, 1.0])
    [1.0, 1.0, 1.0]
    """
    out, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def _boxes(ax: Any, groups: Sequence[Array], colour: str, rng: np.random.Generator) -> None:
    line = {"color": INK, "linewidth": 0.8}
    for position, values in enumerate(groups):
        if not values.size:
            place = {"ha": "center", "va": "center", "transform": ax.get_yaxis_transform()}
            ax.text(0.5, position, "not measured", color=SOFT, fontsize=8, **place)
            continue
        ax.boxplot(
            [values],
            positions=[position],
            orientation="horizontal",
            widths=0.62,
            showfliers=False,
            patch_artist=True,
            boxprops={"facecolor": colour, "alpha": 0.45, "edgecolor": INK, "linewidth": 0.8},
            medianprops={"color": INK, "linewidth": 1.6},
            whiskerprops=line,
            capprops=line,
        )
        spread = position + rng.uniform(-0.2, 0.2, values.size)
        ax.scatter(values, spread, s=7, color=colour, edgecolor=INK, linewidth=0.3, alpha=0.75, zorder=3)
    ax.grid(axis="y", visible=False)


def _known(values: dict[str, float]) -> Array:
    return np.array([v for v in values.values() if not math.isnan(v)])


BACKGROUND_STROKE = "#d9d9d9"
#: Colour of errors, distinct from those of classes.
ERROR = "#ff3df2"
_SIDE = 900  #: target size in pixels of the longer side


def slice_name(z: int, count: int) -> str:
    """`slice 3 of 10`; empty for a picture.

    >>> slice_name(2, 10), slice_name(0, 1)
    ('slice 3 of 10', '')
    """
    return f"slice {z + 1} of {count}" if count > 1 else ""


def zoom_of(shape: tuple[int, ...]) -> int:
    """Screen pixels for one image pixel (..., H, W): a line one screen pixel wide can then follow its edges."""
    return max(1, min(3, _SIDE // max(shape[-2:])))


def window(volume: Volume) -> tuple[float, float]:
    """The intensities shown as black and as white, for all slices."""
    if volume.is_colour and volume.array.dtype == np.uint8:
        return 0.0, 255.0
    low, high = np.percentile(volume.array if volume.is_colour else volume.array[0], (1, 99.5))
    return float(low), float(high)


def base(volume: Volume, z: int, limits: tuple[float, float] | None = None) -> Array:
    """Slice `z` as RGB (zoom H, zoom W, 3) in 0 to 1: colour pictures in colour, else the first channel in grey."""
    low, high = limits or window(volume)
    image = volume.array[:, z] if volume.is_colour else volume.array[:1, z]
    scaled = (255 * np.clip((image - low) / max(high - low, 1e-6), 0, 1)).astype(np.uint8)
    zoom = zoom_of(image.shape)
    size = (image.shape[2] * zoom, image.shape[1] * zoom)
    channels = [np.asarray(Image.fromarray(c).resize(size, Image.Resampling.BICUBIC)) / 255 for c in scaled]
    return np.stack(channels * (3 // len(channels)), axis=2)


def paint(picture: Array, labels: Array, names: Labels, strength: float = 0.55) -> Array:
    """Overlay classes (H, W) on a picture; background only where it is a stroke among unannotated pixels."""
    out, large = picture.copy(), enlarge(labels)
    colours = [BACKGROUND_STROKE if (labels == IGNORE).any() else None, *names.colours()[1:]]
    for k, colour in enumerate(colours):
        if colour is not None:
            where = large == k
            out[where] = (1 - strength) * out[where] + strength * rgb(colour)
    return out


def outline(picture: Array, regions: Array, colour: str = "#ffffff", width: int = 1) -> Array:
    """Draw a line of `width` screen pixels just inside the edges of each region (H, W) that is not 0."""
    large = np.pad(enlarge(regions), width)
    edge = np.zeros(large.shape, dtype=bool)
    for axis in (0, 1):
        for step in range(-width, width + 1):
            edge |= (np.roll(large, step, axis) != large) & (large > 0)
    edge = edge[width:-width, width:-width]
    out = picture.copy()
    out[edge] = 0.15 * out[edge] + 0.85 * rgb(colour)
    return out


def heat(uncertainty: Array) -> Array:
    """Entropy (H, W) from 0 to ln 2, where two classes are equally likely, in the colours of magma."""
    import matplotlib

    coloured: Array = matplotlib.colormaps["magma"](enlarge(np.clip(uncertainty / math.log(2), 0, 1)))[..., :3]
    return coloured


def enlarge(array: Array) -> Array:
    """Repeat the pixels of (H, W) as often as `base` does."""
    zoom = zoom_of(array.shape)
    return np.repeat(np.repeat(array, zoom, axis=0), zoom, axis=1)


def rgb(colour: str) -> Array:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
