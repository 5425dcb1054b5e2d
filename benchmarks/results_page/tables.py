"""Tables of a group: `pclmix compare`'s own over the per-case files, scores in every column, what made each run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from pclmix.evaluate import Summary
from pclmix.report import tables
from pclmix.report.runs import Run
from pclmix.report.significance import AVERAGE
from results_page.groups import COLUMNS, Entry, Group, pool, shared_columns, upper_bounds

#: Rows of the paper that stand beside a frozen recipe.
BESIDE = ("full", "trimix", "pclmix")
NOT_MEASURED = "–"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    return lines + ["| " + " | ".join(str(value) for value in row) + " |" for row in rows]


def comparison(group: Group, published: dict[str, Any], *, average_only: bool = False) -> tuple[list[str], list[str]]:
    """The table of a group as `pclmix compare` writes it, and its notes.

    A pooled group has a row for each column over all its folds, and rows of the paper below; others have a row for each
    run, and the paper's average at its end where the paper has such a row.
    """
    runs = compared_runs(group)
    unranked = () if group.pooled else upper_bounds(group)
    table = tables.build(runs, against=None if group.pooled else group.against, unranked=unranked)
    if average_only:
        table = dataclasses.replace(table, columns=(AVERAGE,))
    body, _, notes = tables.markdown(table).partition("\n\n")
    lines, said = body.splitlines(), [note.rstrip() for note in notes.splitlines()]
    if group.pooled:
        return lines + paper_rows(published, table.columns), [*said, *paper_notes(published)]
    figures = [paper_figure(run, group, published) for run in group.runs]
    if any(figures):
        ends = [" paper |", "---:|", *(f" {pair(figure)} |" for figure in figures)]
        lines = [line + end for line, end in zip(lines, ends, strict=True)]
        said.append(f"Paper: Dice / HD95, {published['paper']['terms']}.")
    return lines, [*said, *network_notes(group)]


def network_notes(group: Group) -> list[str]:
    means = [run.label for run in group.runs if run.reported(group.column) != group.column]
    return [f"{', '.join(means)}: the mean of its networks' scores, each alone."] if means else []


def compared_runs(group: Group) -> list[Run]:
    if group.pooled:
        return [Run(COLUMNS.get(c, c), pool(group.runs, c)) for c in shared_columns(group.runs)]
    return [Run(run.label, run.scores(run.reported(group.column))) for run in group.runs]


def terms(config: dict[str, Any]) -> str:
    """Which terms a run of PCLMix has, as the paper's second table names them."""
    params = config["params"]
    kept = [name for name in ("ctr", "het", "mix") if params[f"lambda_{name}"] > 0]
    if len(kept) == 3:
        return "all" if params["supervise_t"] else "all, without pCE on Ft"
    return " + ".join(["sup", *kept])


def paper_figure(run: Entry, group: Group, published: dict[str, Any]) -> list[float] | None:
    """The paper's average for the row: by method where methods are compared, by terms where these are."""
    methods = {other.config["method"] for other in group.runs}
    if len(methods) > 1:
        row = published["paper"]["rows"].get(run.config["method"])
    elif methods == {"pclmix"} and len({terms(other.config) for other in group.runs}) > 1:
        row = published["ablation"]["rows"].get(terms(run.config))
    else:
        row = None
    return row[AVERAGE] if row else None


def paper_rows(published: dict[str, Any], columns: Sequence[str]) -> list[str]:
    rows = published["paper"]["rows"]
    lines = []
    for key in BESIDE:
        cells = [str(v) for column in columns for v in rows[key].get(column, (NOT_MEASURED,) * 2)]
        lines.append("| " + " | ".join([f"*{rows[key]['name']}, paper, folds 1 to 5*", *cells]) + " |")
    others = [NOT_MEASURED] * 2 * (len(columns) - 1)
    return [
        *lines,
        "| " + " | ".join(["*PCLMix, paper, folds 2 to 5*", *others, *map(str, folds_2_to_5(published))]) + " |",
    ]


def folds_2_to_5(published: dict[str, Any]) -> list[Decimal]:
    """The paper's mean of five folds without that of the authors' predictions of fold 1."""
    five, first = published["paper"]["rows"]["pclmix"][AVERAGE], published["fold1"]["rows"]["pclmix"]["raw"]
    means = [(5 * Decimal(str(a)) - Decimal(str(b))) / 4 for a, b in zip(five, first, strict=True)]
    return [mean.quantize(Decimal("0.1"), ROUND_HALF_UP) for mean in means]


def paper_notes(published: dict[str, Any]) -> list[str]:
    return [
        f"In italics, quoted and on other terms: {published['paper']['terms']}. Folds 2 to 5: its mean of five folds "
        "without that of the authors' predictions of fold 1."
    ]


def pair(figure: Sequence[object] | None) -> str:
    return f"{figure[0]} / {figure[1]}" if figure else NOT_MEASURED


def mean_cell(summary: Summary) -> str:
    return f"{100 * summary.mean('Dice').mean:.1f} / {summary.mean('HD95_50').mean:.1f}"


def columns_table(group: Group) -> list[str]:
    """Dice / HD95 of each run in each column."""
    found = {column for run in group.runs for column in run.columns}
    columns = [*(c for c in COLUMNS if c in found), *sorted(found.difference(COLUMNS))]
    rows = [
        [run.label, *(mean_cell(run.scores(c)) if c in run.columns else NOT_MEASURED for c in columns)]
        for run in group.runs
    ]
    return markdown(["run", *(COLUMNS.get(c, c) for c in columns)], rows)


def origin_table(group: Group) -> list[str]:
    """What made each run, with a link to its files."""
    rows = []
    for run in group.runs:
        made = run.summary["environment"]
        link = f"[{run.label}](../results/acdc/{run.folder.parent.name}/{run.folder.name})"
        settings = [run.summary["fold"], run.config["recipe"], run.config["net"], run.config["seed"]]
        minutes = f"{run.summary['training_minutes']:.2f}"
        commit = made["commit"] or "not committed"
        rows.append([link, *settings, run.summary["steps"], minutes, made["device"], commit])
    return markdown(["run", "fold", "recipe", "net", "seed", "steps", "training minutes", "device", "commit"], rows)


def published_tables(published: dict[str, Any]) -> list[str]:
    """The paper's own table, and the authors' predictions of fold 1."""
    paper, first = published["paper"], published["fold1"]
    columns = [c for c in paper["rows"]["pclmix"] if c != "name"]
    rows = [[row["name"], *(pair(row[c]) for c in columns)] for row in paper["rows"].values()]
    lines = [f"Dice / HD95: {paper['source']}; {paper['terms']}.", "", *markdown(["", *columns], rows), ""]
    kinds = list(first["rows"]["pclmix"])
    rows = [[paper["rows"][key]["name"], *(pair(row[k]) for k in kinds)] for key, row in first["rows"].items()]
    heads = ["fold 1", *(COLUMNS[k] for k in kinds)]
    return [*lines, f"Dice / HD95: {first['source']}.", "", *markdown(heads, rows), ""]


def read_published(root: Path) -> dict[str, Any]:
    """Figures quoted from others, each with its source."""
    content: dict[str, Any] = json.loads((root / "results" / "published.json").read_text(encoding="utf-8"))
    return content
