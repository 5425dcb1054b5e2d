"""HTML pages from Jinja templates: one file that opens offline. `compare` writes the page of several evaluations."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from pclmix import __version__
from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.io.files import atomic_folder, write_json
from pclmix.metrics.functional import MEASURES
from pclmix.report import figures, tables
from pclmix.report.figures import style
from pclmix.report.qualitative import qualitative
from pclmix.report.tables import Run

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

#: Colours of pclmix.mplstyle and the CSS variables of style.css that replace them in pages.
VARIABLES = {
    "#1c2430": "var(--ink)",
    "#5b6675": "var(--soft)",
    "#dfe3e8": "var(--rule)",
    "#0b6b8f": "var(--accent)",
    "#9fc4d4": "var(--faint)",
}


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("pclmix.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, **context: Any) -> str:
    """The page that `template` makes of `context`; every value is escaped."""
    return _environment().get_template(template).render(context)


def svg(figure: Any, label: str) -> Markup:
    """A matplotlib figure as an <svg> element in the colours of the page; `label` describes it to screen readers."""
    from markupsafe import Markup, escape
    from matplotlib import rc_context

    buffer = io.StringIO()
    with style(), rc_context({"savefig.bbox": None}):  # tight boxes would give curves different widths
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    referred = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in referred else "", text)
    text = re.sub(r' (?:xmlns(?::\w+)?|version)="[^"]*"', "", text)
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1))


def data_uri(picture: npt.NDArray[Any]) -> str:
    """RGB (H, W, 3) in 0 to 1 as a JPEG data URI."""
    buffer = io.BytesIO()
    pixels = (255 * np.clip(picture, 0, 1)).round().astype(np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", quality=88, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


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
        shown: dict[str, Any] = {"boxplots": svg(boxes, "Box plots of Dice and HD95"), "qualitative": None}
        case = None
        if dataset is not None:
            focus = _named(runs, median_of or chosen)
            figure, case = qualitative(runs, Dataset.open(dataset), focus)
            figures.save(figure, folder, "qualitative")
            shown |= {"qualitative": svg(figure, f"Predictions of {case}"), "case": case, "median_of": focus.name}
        write_json(folder / "compare.json", _content(runs, table, chosen, case))
        page = render("compare.html.j2", table=table, **shown)
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
