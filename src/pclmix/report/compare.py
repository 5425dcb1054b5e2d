"""`compare`: a folder with the table of several runs, box plots and a qualitative figure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from pclmix import __version__
from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.io.files import atomic_folder, write_json
from pclmix.metrics.functional import MEASURES
from pclmix.report import figures, html, tables
from pclmix.report.qualitative import qualitative
from pclmix.report.runs import Run


def compare(
    runs: Sequence[Run],
    out: Path,
    *,
    against: str | None = None,
    dataset: Path | None = None,
    median_of: str | None = None,
    empty: tables.Empty = "50",
    unranked: Collection[str] = (),
) -> tables.Table:
    """Write table.md, .csv, .tex, compare.json, boxplots and report.html to the new folder `out`.

    Tests are against the run called `against`, by default the first. With a dataset there is a qualitative figure of
    the median case of `median_of`, by default the same run.
    """
    if not runs:
        raise PclmixError("nothing to compare; give at least one run")
    chosen = against or runs[0].name
    table = tables.build(runs, against=chosen, empty=empty, unranked=unranked)
    with atomic_folder(out) as folder:
        for name, text in (
            ("table.md", tables.markdown(table)),
            ("table.csv", tables.as_csv(table)),
            ("table.tex", tables.latex(table)),
        ):
            (folder / name).write_text(text, encoding="utf-8")
        boxes = figures.boxplots(runs, hd95="HD95_50" if empty == "50" else "HD95")
        figures.save(boxes, folder, "boxplots")
        shown: dict[str, Any] = {"boxplots": html.svg(boxes, "Box plots of Dice and HD95"), "qualitative": None}
        case = None
        if dataset is not None:
            focus = _named(runs, median_of or chosen)
            figure, case = qualitative(runs, Dataset.open(dataset), focus)
            figures.save(figure, folder, "qualitative")
            shown |= {"qualitative": html.svg(figure, f"Predictions of {case}"), "case": case, "median_of": focus.name}
        write_json(folder / "compare.json", _content(runs, table, chosen, case))
        page = html.render("compare.html.j2", table=table, **shown)
        (folder / "report.html").write_text(page, encoding="utf-8")
    return table


def _named(runs: Sequence[Run], name: str) -> Run:
    for run in runs:
        if run.name == name:
            return run
    raise PclmixError(f"no run is called '{name}'. Known: {', '.join(run.name for run in runs)}")


def _content(runs: Sequence[Run], table: tables.Table, against: str, case: str | None) -> dict[str, Any]:
    rows = {}
    for run in runs:
        columns = {}
        for column, cells in table.cells[run.name].items():
            measures = {m: run.summary.column(column, m).to_json() for m in MEASURES}
            p = {m: None if math.isnan(cell.p) else cell.p for m, cell in cells.items()}
            columns[column] = {**measures, "p_holm": p, "rank": {m: cell.rank for m, cell in cells.items()}}
        rows[run.name] = {"cases": table.counts[run.name], "columns": columns}
    return {
        "against": against,
        "rows": rows,
        "unit": table.unit,
        "notes": list(table.notes),
        "median_case": case,
        "version": __version__,
    }
