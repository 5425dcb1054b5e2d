"""The table of a comparison as numbers, and as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from pclmix.errors import PclmixError, nearest
from pclmix.io.volume import Unit
from pclmix.metrics import Statistic
from pclmix.metrics.comparison import holm, wilcoxon
from pclmix.metrics.summary import AVERAGE
from pclmix.report.runs import Run

Empty = Literal["50", "nan"]
MARKS = ((0.01, "‡"), (0.05, "†"))


@dataclass(frozen=True)
class Cell:
    """Mean and sd (Dice is printed in percent), the rank among the ranked rows, and p against the chosen row."""

    statistic: Statistic
    scale: float
    rank: int | None
    p: float  #: Holm-corrected over the rows and columns of one measure; NaN in the chosen row

    @property
    def text(self) -> str:
        if math.isnan(self.statistic.mean):
            return "–"
        return f"{self.scale * self.statistic.mean:.1f} ({self.scale * self.statistic.sd:.1f})"

    @property
    def mark(self) -> str:
        return next((mark for level, mark in MARKS if self.p < level), "")


@dataclass(frozen=True)
class Table:
    """`cells[row][column][measure]`; columns are the classes and the average, measures `Dice` and `HD95`."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[str, dict[str, dict[str, Cell]]]
    counts: dict[str, int]
    notes: tuple[str, ...]
    unit: Unit = "mm"  #: of HD95

    def line(self, row: str) -> list[Cell]:
        """The cells of a row: Dice and HD95 of each column."""
        return [self.cells[row][column][measure] for column in self.columns for measure in ("Dice", "HD95")]


def build(runs: Sequence[Run], *, against: str | None, empty: Empty = "50", unranked: Collection[str] = ()) -> Table:
    """Means, ranks and, with `against`, tests against that row; `unranked` rows (upper bounds) are never best."""
    by_name = {run.name: run for run in runs}
    for name in (*unranked, *([] if against is None else [against])):
        if name not in by_name:
            raise PclmixError(f"no run is called '{name}'.{nearest(name, by_name)} Known: {', '.join(by_name)}")
    columns = (*runs[0].summary.names, AVERAGE)
    source = {"Dice": "Dice", "HD95": "HD95_50" if empty == "50" else "HD95"}
    cells: dict[str, dict[str, dict[str, Cell]]] = {run.name: {c: {} for c in columns} for run in runs}
    for measure, key in source.items():
        scale = 100.0 if measure == "Dice" else 1.0
        p = {} if against is None else _p_values(runs, by_name[against], columns, key)
        for column in columns:
            stats = {run.name: run.summary.column(column, key) for run in runs}
            ranks = _ranks(
                {name: scale * s.mean for name, s in stats.items() if name not in unranked}, largest=measure == "Dice"
            )
            for name, statistic in stats.items():
                cells[name][column][measure] = Cell(statistic, scale, ranks.get(name), p.get((name, column), math.nan))
    counts = {run.name: len(run.summary.cases) for run in runs}
    return Table(tuple(by_name), columns, cells, counts, _notes(runs, against, empty, unranked), unit_of(runs))


def unit_of(runs: Sequence[Run]) -> Unit:
    """The unit of the distances of all runs; a run without distances, as nnU-Net's own summary, fits any."""
    units = {run.summary.unit: run.name for run in runs if run.summary.mean("HD95").n}
    if len(units) > 1:
        raise PclmixError(f"'{units['mm']}' has distances in mm and '{units['px']}' in px; they cannot be compared")
    return next(iter(units), "mm")


def markdown(table: Table) -> str:
    """GitHub Markdown: best bold, second underlined."""
    heads = [f"{column} {measure}" for column in table.columns for measure in ("Dice ↑", "HD95 ↓")]
    lines = ["| | " + " | ".join(heads) + " |", "|---" + "|---:" * len(heads) + "|"]
    for name in table.rows:
        shown = [_dress(cell, "**{}**".format, "<u>{}</u>".format, str) for cell in table.line(name)]
        lines.append(f"| {name.replace('|', chr(92) + '|')} | " + " | ".join(shown) + " |")
    return "\n".join([*lines, "", *(f"{note}  " for note in table.notes)]).rstrip() + "\n"


def latex(table: Table) -> str:
    r"""A LaTeX tabular; needs \usepackage{booktabs}."""
    groups = " & ".join(rf"\multicolumn{{2}}{{c}}{{{_tex(column)}}}" for column in table.columns)
    rules = " ".join(rf"\cmidrule(lr){{{2 + 2 * i}-{3 + 2 * i}}}" for i in range(len(table.columns)))
    heads = " & ".join([r"Dice$\uparrow$ & HD95$\downarrow$"] * len(table.columns))
    lines = [rf"\begin{{tabular}}{{l{'c' * (2 * len(table.columns))}}}", r"\toprule"]
    lines += [rf"Methods & {groups} \\", rules, rf"& {heads} \\", r"\midrule"]
    signs = {"": "", "†": r"$^{\dagger}$", "‡": r"$^{\ddagger}$"}
    for name in table.rows:
        shown = [
            _dress(cell, r"\textbf{{{}}}".format, r"\underline{{{}}}".format, signs.__getitem__).replace("–", "--")
            for cell in table.line(name)
        ]
        lines.append(" & ".join([_tex(name), *shown]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def as_csv(table: Table) -> str:
    """Plain numbers: mean, sd, count of NaN and corrected p of each column and measure."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = [f"{c} {m}" for c in table.columns for m in ("Dice", "HD95")]
    writer.writerow(["method", "cases", *(f"{head}{part}" for head in heads for part in ("", " sd", " nan", " p"))])
    for name in table.rows:
        numbers: list[object] = []
        for cell in table.line(name):
            s = cell.statistic
            numbers += [f"{cell.scale * s.mean:.4f}", f"{cell.scale * s.sd:.4f}", s.nan, f"{cell.p:.4g}"]
        writer.writerow([name, table.counts[name], *numbers])
    return out.getvalue()


def _dress(cell: Cell, best: Callable[[str], str], second: Callable[[str], str], mark: Callable[[str], str]) -> str:
    text = best(cell.text) if cell.rank == 1 else second(cell.text) if cell.rank == 2 else cell.text
    return text + mark(cell.mark)


def _p_values(runs: Sequence[Run], chosen: Run, columns: Sequence[str], key: str) -> dict[tuple[str, str], float]:
    """Corrected p of every other run and column against the chosen run."""
    tests = [(run, column) for run in runs for column in columns if run.name != chosen.name]
    p_values = holm([wilcoxon(r.summary.by_case(c, key), chosen.summary.by_case(c, key)) for r, c in tests])
    return {(run.name, column): p for (run, column), p in zip(tests, p_values, strict=True)}


def _ranks(means: dict[str, float], *, largest: bool) -> dict[str, int]:
    """1 for the best, 2 for the second; equal as printed is equal in rank. A single value has no rank."""
    shown = {name: round(value, 1) for name, value in means.items() if not math.isnan(value)}
    if len(shown) < 2:
        return {}
    order = sorted(set(shown.values()), reverse=largest)[:2]
    return {name: 1 + order.index(value) for name, value in shown.items() if value in order}


def _notes(runs: Sequence[Run], against: str | None, empty: Empty, unranked: Collection[str]) -> tuple[str, ...]:
    counts = {run.name: len(run.summary.cases) for run in runs}
    cases = {frozenset(entry.case for entry in run.summary.cases) for run in runs}
    unit = unit_of(runs)
    rule = f"counts as 50 {unit}" if empty == "50" else "is left out"
    notes = [
        f"Dice in percent and HD95 in {unit}, mean (standard deviation) over {min(counts.values())} cases. "
        f"An empty prediction of a present class has Dice 0; in HD95 it {rule}. "
        f"{AVERAGE}: classes and cases pooled. Best bold, second underlined."
    ]
    if len(runs) > 1 and against is not None:
        notes.append(
            f"† p < 0.05, ‡ p < 0.01 against {against}: Wilcoxon's signed-rank test over cases (for {AVERAGE}, their "
            "means over classes), corrected by Holm over all rows and columns of one measure."
        )
    if unranked:
        notes.append(f"Not ranked: {', '.join(unranked)}.")
    if len(cases) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        notes.append(f"Rows cover different cases ({listed}); the tests use the shared ones.")
    for run in runs:
        empties = run.summary.empty_predictions()
        if empties:
            notes.append(f"{run.name}: {empties} empty prediction{'s' if empties > 1 else ''} of a present class.")
        if run.summary.missing:
            notes.append(f"{run.name}: no prediction for {', '.join(run.summary.missing)}.")
        if run.summary.largest_component:
            notes.append(f"{run.name}: the largest 3D component of each class.")
    return tuple(notes)


def _tex(text: str) -> str:
    special = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}"}
    special |= {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}"}
    return "".join(special.get(letter, letter) for letter in text)
