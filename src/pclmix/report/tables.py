"""The table of a comparison: its runs, its numbers, and its forms as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pclmix.errors import PclmixError, nearest
from pclmix.io.files import read_json
from pclmix.io.volume import Unit, ending_of, stem_of
from pclmix.metrics import Statistic, Summary, evaluate, read_summary
from pclmix.metrics.comparison import holm, wilcoxon
from pclmix.metrics.functional import NAN, Scores, Status
from pclmix.metrics.run import Progress
from pclmix.metrics.summary import AVERAGE, CaseScores, from_json

#: Generic file names: the name of the folder is used instead.
_PLAIN_NAMES = ("evaluation", "summary", "cases", "predictions", "scores")


@dataclass(frozen=True)
class Run:
    """One row. `predictions` is the folder of the scored label maps, where it still exists."""

    name: str
    summary: Summary
    predictions: Path | None = None


def read_runs(
    specs: Sequence[str], reference: Path | None = None, *, fold: int | None = None, progress: Progress | None = None
) -> list[Run]:
    """Read `NAME=PATH` or `PATH` specs. Classes must agree; numbered classes take the names of a run that has names."""
    named = [_split(spec) for spec in specs]
    names = [name for name, _ in named]
    for name in names:
        if names.count(name) > 1:
            raise PclmixError(f"two runs are called '{name}'; give them names as in A={named[names.index(name)][1]}")
    return _same_classes([_read(name, path, reference, fold, progress) for name, path in named])


def read_nnunet(content: Any, where: Path) -> Summary:
    """Read a summary.json of nnU-Net v2: Dice per case and class. It has no distances, so these are NaN."""
    try:
        cases = []
        for entry in content["metric_per_case"]:
            metrics = {_label(key, where): value for key, value in entry["metrics"].items()}
            scores = {str(k): _nnunet_scores(metrics[k]) for k in sorted(metrics) if k != 0}
            cases.append(CaseScores(stem_of(Path(entry["prediction_file"])), scores))
        names = tuple(cases[0].classes)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise PclmixError(f"{where} is not a summary.json of nnU-Net v2 ({error!r})") from error
    if not names or any(tuple(case.classes) != names for case in cases):
        raise PclmixError(f"{where}: the cases do not have the same classes")
    return Summary(names, tuple(sorted(cases, key=lambda case: case.case)), prediction=str(where.parent))


def _label(key: str, where: Path) -> int:
    if not key.strip().isdigit():
        raise PclmixError(f"{where}: '{key}' is a region of several labels; only plain classes can be compared")
    return int(key)


def _nnunet_scores(row: Any) -> Scores:
    dice = NAN if row["Dice"] is None else float(row["Dice"])  # some writers use null for NaN
    predicted, present = row.get("n_pred", 1), row.get("n_ref", 1)
    status: Status = "scored"
    if math.isnan(dice) or not (predicted or present):
        status = "absent"
    elif not predicted:
        status = "empty prediction"
    elif not present:
        status = "predicted where absent"
    return Scores(status, dice, NAN, NAN, NAN, NAN, NAN)


def _split(spec: str) -> tuple[str, Path]:
    name, equals, rest = spec.partition("=")
    if equals and name and rest and not Path(spec).exists():
        return name, Path(rest)
    path = Path(spec)
    stem = stem_of(path) if path.suffix else path.name
    return (path.resolve().parent.name if stem in _PLAIN_NAMES else stem) or path.resolve().name, path


def _read(name: str, path: Path, reference: Path | None, fold: int | None, progress: Progress | None) -> Run:
    if not path.exists():
        raise PclmixError(f"{path} does not exist")
    source = _source(path, reference)
    if source is None:
        if reference is None:
            raise PclmixError(
                f"{path} holds no evaluation (evaluation.json, cases.csv or nnU-Net's summary.json); "
                "give --reference DATASET to score its predictions now"
            )
        summary = evaluate(path, reference, fold=fold, progress=progress)
    elif source.suffix == ".csv":
        summary = read_summary(source)
    else:
        content = read_json(source)
        nnunet = isinstance(content, dict) and "metric_per_case" in content
        summary = read_nnunet(content, source) if nnunet else from_json(content, source)
    return Run(name, summary, _predictions(path, summary))


def _source(path: Path, reference: Path | None) -> Path | None:
    """The file with the scores; None where predictions must be scored first."""
    if path.is_file():
        return path if path.suffix in (".json", ".csv") else None
    has_maps = any(ending_of(file) for file in path.glob("[!.]*"))
    for known in ("evaluation.json", "summary.json", "cases.csv"):
        # nnU-Net's summary has no distances: prefer scoring its predictions where a reference is given.
        if (path / known).is_file() and not (known == "summary.json" and has_maps and reference is not None):
            return path / known
    ours = [file for file in sorted(path.glob("[!.]*.json")) if _is_evaluation(read_json(file))]
    if len(ours) > 1:
        raise PclmixError(f"{path} holds several evaluations, {ours[0].name} and {ours[1].name}; name one of them")
    return ours[0] if ours else None


def _is_evaluation(content: Any) -> bool:
    return isinstance(content, dict) and isinstance(content.get("cases"), list) and "classes" in content


def _predictions(path: Path, summary: Summary) -> Path | None:
    folder = path if path.is_dir() else path.parent
    for candidate in (folder / "predictions", folder, Path(summary.prediction) if summary.prediction else folder):
        with suppress(OSError, ValueError):  # the summary may name anything
            if candidate.is_dir() and any(ending_of(file) for file in candidate.glob("[!.]*")):
                return candidate
    return None


def _same_classes(runs: list[Run]) -> list[Run]:
    """Numbered classes ("1", "2", ...) take the names of the first run that has names."""
    chosen = next((run for run in runs if not _is_numbered(run.summary.names)), runs[0])
    names = chosen.summary.names
    out = []
    for run in runs:
        own = run.summary.names
        if len(own) != len(names) or (own != names and not _is_numbered(own)):
            raise PclmixError(
                f"'{run.name}' has the classes {', '.join(own)}, '{chosen.name}' has {', '.join(names)}; "
                "only runs of one task can be compared"
            )
        cases = tuple(
            CaseScores(entry.case, {new: entry.classes[old] for old, new in zip(own, names, strict=True)})
            for entry in run.summary.cases
        )
        out.append(dataclasses.replace(run, summary=dataclasses.replace(run.summary, names=names, cases=cases)))
    return out


def _is_numbered(names: tuple[str, ...]) -> bool:
    return names == tuple(str(k) for k in range(1, len(names) + 1))


Empty = Literal["50", "nan"]
MARKS = ((0.01, "‡"), (0.05, "†"))


@dataclass(frozen=True)
class Cell:
    """Mean and sd (Dice is printed in percent), rank among the ranked rows, and p against the chosen row."""

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
    """Means, ranks and, with `against`, tests against that row; `unranked` rows (upper bounds) get no rank."""
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
    """The unit of the distances of all runs; runs without distances, as nnU-Net's summaries, fit any."""
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
    """1 for the best, 2 for the second; equal printed values share a rank. A single value has no rank."""
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
