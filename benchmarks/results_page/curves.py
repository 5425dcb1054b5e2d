"""docs/curves.png: Dice against training minutes. The file carries a hash of what it was drawn from and by."""

from __future__ import annotations

import csv
import hashlib
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pclmix.files import atomic_path
from pclmix.report.figures import INK
from results_page.groups import Group

KEY = "Source"
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6bb1", "#7f7f7f")
STYLES = ("-", (0, (4, 1.6)), (0, (1.2, 1.2)))
TICKS = (0, 20, 40, 60, 70, 80, 85, 90, 92.5, 95, 97.5)


@dataclass(frozen=True)
class Line:
    label: str
    minutes: tuple[float, ...]
    dice: tuple[float, ...]  #: percent
    chosen: bool  #: the run that others are tested against


def read_curves(groups: list[Group]) -> dict[str, list[Line]]:
    """Title of each group that has curves, and a line for each of its runs that has one."""
    panels = {}
    for group in groups:
        lines = []
        for run in group.runs:
            rows = []
            if run.curve:
                with run.curve.open(newline="", encoding="utf-8") as file:
                    rows = list(csv.DictReader(file))
            if not rows:
                continue
            minutes, dice = ([float(row[key]) for row in rows] for key in ("minutes", "Dice"))
            lines.append(Line(run.label, tuple(minutes), tuple(100 * d for d in dice), run.label == group.against))
        if lines:
            panels[str(group.about["title"])] = lines
    return panels


def fingerprint(panels: dict[str, list[Line]]) -> str:
    """Of the points and of this file: another drawing of the same points is another picture."""
    points = {t: [[n.label, n.minutes, n.dice, n.chosen] for n in lines] for t, lines in panels.items()}
    text = json.dumps(points, sort_keys=True) + Path(__file__).read_text(encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()


def drawn_from(path: Path) -> str | None:
    """The fingerprint in a picture; None where there is no picture."""
    if not path.is_file():
        return None
    from PIL import Image

    with Image.open(path) as image:
        return str(image.info.get(KEY, ""))


def draw(panels: dict[str, list[Line]], path: Path) -> None:
    """A panel for each group. Dice is spaced by the logarithm of what is missing to 100, so that the top is wide."""
    from matplotlib.figure import Figure

    heights = [
        max(2.3, 0.45 + sum(0.17 * len(wrapped(n.label).splitlines()) for n in lines)) for lines in panels.values()
    ]
    figure = Figure(figsize=(9.2, sum(heights) + 0.75 * len(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (title, lines) in zip(axes, panels.items(), strict=True):
        draw_panel(ax, title, lines)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=130, facecolor="white", metadata={KEY: fingerprint(panels)})


def draw_panel(ax: Any, title: str, lines: list[Line]) -> None:
    from matplotlib.ticker import MaxNLocator

    ranked = sorted(lines, key=lambda line: -line.dice[-1])
    for line in ranked:
        place = lines.index(line)  # colours follow the order of the group, the legend that of the ends
        colour = INK if line.chosen else COLOURS[place % len(COLOURS)]
        style = "-" if line.chosen else STYLES[place // len(COLOURS) % len(STYLES)]
        wide = 2.4 if line.chosen else 1.5
        label = wrapped(f"{line.dice[-1]:.1f}  {line.label}".replace("`", ""))
        ax.plot(line.minutes, line.dice, color=colour, linestyle=style, linewidth=wide, marker="o", markersize=3,
                label=label, zorder=4 if line.chosen else 3)  # fmt: skip
    ax.set_yscale("function", functions=(missing, present))
    values = [d for line in lines for d in line.dice]
    low, high = present(missing(min(values)) - 0.08), present(missing(max(values)) + 0.08)
    ax.set_ylim(low, high)
    ticks = [t for t in TICKS if low <= t <= high]
    if len(ticks) < 3:
        ticks = [t for t in MaxNLocator(5).tick_values(low, high) if low <= t <= high]
    ax.set_yticks(ticks)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xlim(left=0)
    ax.set_title(title.replace("`", ""), loc="left", fontsize=10, fontweight="bold", color=INK)
    ax.set_xlabel("training minutes", fontsize=9, color=INK)
    ax.set_ylabel("Dice, %", fontsize=9, color=INK)
    ax.tick_params(length=0, labelsize=8, colors=INK, which="both")
    ax.grid(color="#e6e6e6", linewidth=0.7)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#999999")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8, handlelength=2.6)


def wrapped(label: str) -> str:
    return textwrap.fill(label, 44)


def missing(dice: Any) -> Any:
    return -np.log(np.maximum(100.5 - np.asarray(dice, dtype=float), 0.5))


def present(value: Any) -> Any:
    return 100.5 - np.exp(-np.asarray(value, dtype=float))
