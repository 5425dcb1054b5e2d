"""`compare`: runs in, a folder with the table in four formats, box plots and a qualitative figure out."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from pclmix import __version__
from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.files import atomic_folder, write_json
from pclmix.report import figures, tables
from pclmix.report.runs import Run

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
thead tr:first-child th { border-top: 2px solid #222; } thead tr:last-child th { border-bottom: 1px solid #222; }
thead th { font-weight: 600; padding: .3rem .8rem; }
tbody th { text-align: left; font-weight: 500; padding-right: 1rem; }
td { text-align: right; padding: .28rem .8rem; } tbody tr:last-child > * { border-bottom: 2px solid #222; }
tbody tr:hover { background: #f3f6f9; }
.notes { color: #555; font-size: .85rem; padding-left: 1.1rem; } img { max-width: 100%; height: auto; }
"""


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

    Tests are against the run called `against`, the first unless said. With a dataset there is a qualitative figure
    of the median case of `median_of`, the same run as `against` unless said.
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
        pictures = [("Cases", "one point a case", figures.save(boxes, folder, "boxplots")[0])]
        case = None
        if dataset is not None:
            focus = _named(runs, median_of or chosen)
            figure, case = figures.qualitative(runs, Dataset.open(dataset), focus)
            text = f"{case}, the median case of {focus.name} by Dice"
            pictures.append(("One case", text, figures.save(figure, folder, "qualitative")[0]))
        write_json(folder / "compare.json", _content(runs, table, chosen, case))
        (folder / "report.html").write_text(_page(table, pictures), encoding="utf-8")
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
            measures = {
                m: (run.summary.of_class(column, m) if column in run.summary.names else run.summary.mean(m)).to_json()
                for m in ("Dice", "HD95", "HD95_50", "ASSD")
            }
            p = {m: None if math.isnan(cell.p) else cell.p for m, cell in cells.items()}
            columns[column] = {**measures, "p_holm": p, "rank": {m: cell.rank for m, cell in cells.items()}}
        rows[run.name] = {"cases": table.counts[run.name], "columns": columns}
    return {
        "against": against,
        "rows": rows,
        "notes": list(table.notes),
        "median_case": case,
        "version": __version__,
    }


def _page(table: tables.Table, pictures: Sequence[tuple[str, str, Path]]) -> str:
    """One file that opens offline: pictures are inside."""
    parts = [f"<h1>Comparison of {len(table.rows)} runs</h1><div class='wide'>{tables.as_html(table)}</div>"]
    for title, text, path in pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append(
            f"<h2>{html.escape(title)}</h2><p class='notes'>{html.escape(text)}</p>"
            f"<img alt='{html.escape(title, quote=True)}' src='data:image/png;base64,{data}'>"
        )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' "
        f"content='width=device-width, initial-scale=1'><title>pclmix compare</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )
