"""The tables of README.md, docs/results.md and docs/scale.md, and results/summary.json, from files under results/.

    python benchmarks/results.py            # writes them
    python benchmarks/results.py --check    # fails where one of them differs from the files

results/tables.json lists the rows. A row's folder under results/acdc holds one folder per run, as benchmarks/acdc.py
writes them: raw.csv, component.csv (largest component), summary.json, config.yaml. Quoted figures are in the lists.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import scale
from pclmix.io.files import atomic_path, read_json
from pclmix.metrics import Summary, read_summary

ROOT = Path(__file__).parents[1]
FIVE = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Run:
    folder: Path
    about: dict[str, Any]  #: summary.json
    seed: int

    def scores(self, column: str) -> Summary:
        return read_summary(self.folder / f"{column}.csv")


def read_runs(root: Path, name: str) -> list[Run]:
    """The runs of results/acdc/NAME by fold and seed; none where the folder is not there."""
    found = []
    for about in sorted((root / "results" / "acdc" / name).glob("**/summary.json")):
        config = yaml.safe_load(about.with_name("config.yaml").read_text(encoding="utf-8"))
        found.append(Run(about.parent, read_json(about), config["seed"]))
    return sorted(found, key=lambda run: (run.about["fold"], run.seed))


def mean(runs: Sequence[Run], measure: str, column: str = "raw") -> float:
    """All cases and classes pooled; Dice in percent."""
    values = np.concatenate([run.scores(column).values(measure).ravel() for run in runs])
    return float(np.nanmean(values)) * (100 if measure == "Dice" else 1)


def cell(runs: Sequence[Run], column: str = "raw") -> str:
    return f"{mean(runs, 'Dice', column):.1f} / {mean(runs, 'HD95_50', column):.1f}" if runs else "–"


def quoted(figures: Sequence[float | None] | None) -> str:
    return " / ".join("–" if value is None else f"{value}" for value in figures) if figures else "–"


def folds_of(runs: Sequence[Run]) -> tuple[int, ...]:
    return tuple(sorted({int(run.about["fold"]) for run in runs}))


def longest(runs: Sequence[Run]) -> float:
    """Minutes of training of the longest run."""
    return max(float(run.about["training_minutes"]) for run in runs)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def readme(root: Path, tables: dict[str, Any]) -> list[str]:
    """Dice / HD95 of each row, five folds and MAAG split; a row without either is left out."""
    rows = []
    for row in tables["rows"]:
        cells = []
        for key in ("five_folds", "maag"):
            value = row.get(key)
            runs = read_runs(root, value) if isinstance(value, str) else []
            folds = folds_of(runs)
            partly = key == "five_folds" and runs and folds != FIVE
            shown = cell(runs) if isinstance(value, str) else quoted(value)
            cells.append(f"{shown} (folds {folds[0]} to {folds[-1]})" if partly else shown)
        if set(cells) != {"–"}:
            rows.append([row["name"], *cells])
    return [*table(["Dice % ↑ / HD95 mm ↓", "five folds", "MAAG split"], rows), " ".join(tables["sources"])]


def summary(root: Path, tables: dict[str, Any]) -> dict[str, Any]:
    """The headline figures; a section without all of its runs is left out."""
    found = {}
    for section, names in tables["summary"].items():
        runs, full = read_runs(root, names["run"]), read_runs(root, names["full"])
        if not runs or (section.endswith("5fold") and folds_of(runs) != FIVE):
            continue
        complete = full and folds_of(full) == folds_of(runs)
        found[section] = {
            "dice": round(mean(runs, "Dice"), 2),
            "hd95": round(mean(runs, "HD95_50"), 2),
            "full_dice": round(mean(full, "Dice"), 2) if complete else None,
            "seeds": sorted({run.seed for run in runs}),
            "minutes": round(longest(runs), 2),
        }
    return found


def five_folds(root: Path, tables: dict[str, Any]) -> list[str]:
    rows = []
    for row in tables["rows"]:
        runs = read_runs(root, row["five_folds"]) if isinstance(row.get("five_folds"), str) else []
        if runs:
            by_fold = [cell([run for run in runs if run.about["fold"] == fold]) for fold in FIVE]
            late = [run for run in runs if run.about["fold"] >= 3]
            last = cell(late) if folds_of(late) == FIVE[2:] else "–"
            rows.append([row["name"], *by_fold, cell(runs), last, cell(runs, "component"), f"{longest(runs):.1f}"])
    return table(["", *(f"fold {n}" for n in FIVE), "mean", "folds 3 to 5", "largest component", "minutes"], rows)


def maag(root: Path, tables: dict[str, Any]) -> list[str]:
    named = [(row["name"], read_runs(root, row["maag"])) for row in tables["rows"] if isinstance(row.get("maag"), str)]
    rows = [[name, str(len(r)), cell(r), cell(r, "component"), f"{longest(r):.1f}"] for name, r in named if r]
    heads = ["", "runs", "raw", "largest component", "minutes"]
    return table(heads, rows) if rows else ["No run of this split has per-case files here yet.", ""]


def fold1(root: Path, tables: dict[str, Any], *, key: str, paper: str) -> list[str]:
    """One run a row on fold 1, beside the paper's five-fold average."""
    published = read_json(root / "results" / "published.json")[paper]["rows"]
    rows = []
    for folder, label in tables[key].items():
        runs, row = read_runs(root, folder), published.get(label, {})
        name = "dense masks" if label == "full" else f"`{label}`" if key == "methods" else label
        rows.append([name, cell(runs), cell(runs, "component"), quoted(row.get("Avg"))])
    return table(["", "raw", "largest component", "paper, five folds"], rows)


def records(root: Path, tables: dict[str, Any], *, folder: str) -> list[str]:
    """A row for each JSON file of a folder; columns are dotted keys and their headings."""
    columns, rows = tables["records"][folder], []
    for path in sorted((root / "results" / folder).glob("*.json")):
        content = read_json(path)
        rows.append([path.stem.replace("-", " "), *(short(look_up(content, key)) for key in columns)])
    return table(["", *columns.values()], rows) if rows else ["Not measured yet.", ""]


def active(root: Path, tables: dict[str, Any]) -> list[str]:
    """Dice after each round, mean over the seeds, and the places drawn in."""
    rows, most = [], 0
    for strategy, label in tables["active"].items():
        runs = [read_json(path)["rounds"] for path in sorted((root / "results" / "active").glob(f"{strategy}-*.json"))]
        if runs:
            count = min(map(len, runs))
            means = [f"{100 * float(np.mean([run[n]['dice'] for run in runs])):.1f}" for n in range(count)]
            rows.append([label, str(len(runs)), *means, f"{np.mean([run[count - 1]['spots'] for run in runs]):.0f}"])
            most = max(most, count)
    rows = [[*row[:-1], *["–"] * (most + 3 - len(row)), row[-1]] for row in rows]
    heads = ["", "seeds", *(f"round {n}" if n else "first" for n in range(most)), "places"]
    return table(heads, rows) if rows else ["Not measured yet.", ""]


def look_up(content: Any, key: str) -> Any:
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 5 else f"{value:.1f}"
    return {None: "–", True: "yes", False: "no"}.get(value, str(value))


def scaled(root: Path, tables: dict[str, Any], *, make: Callable[[Path], scale.Rows]) -> list[str]:
    return table(*make(root))


#: The text between <!-- NAME --> and <!-- /NAME --> in the pages.
PARTS: dict[str, Callable[[Path, dict[str, Any]], list[str]]] = {
    "readme": readme,
    "five_folds": five_folds,
    "maag": maag,
    "methods": partial(fold1, key="methods", paper="paper"),
    "ablation": partial(fold1, key="ablation", paper="ablation"),
    "active": active,
    **{name: partial(scaled, make=make) for name, make in scale.PARTS.items()},
    **{name: partial(records, folder=name) for name in ("start", "step", "predict", "uncertainty", "export", "laptop")},
}


def filled(root: Path, page: Path, tables: dict[str, Any]) -> str:
    """The page with every part generated again."""

    def part(found: re.Match[str]) -> str:
        return "\n".join([found[1], *PARTS[found[2]](root, tables), found[3]])

    text = page.read_text(encoding="utf-8")
    return re.sub(r"(<!-- (\w+) -->)\n.*?(<!-- /\2 -->)", part, text, flags=re.DOTALL)


def outdated(root: Path) -> dict[Path, str]:
    """The files that differ from results/, and their correct content."""
    tables = read_json(root / "results" / "tables.json")
    pages = (root / "README.md", root / "docs" / "results.md", root / "docs" / "scale.md")
    wanted = {page: filled(root, page, tables) for page in pages}
    wanted[root / "results" / "summary.json"] = json.dumps(summary(root, tables), indent=2) + "\n"
    return {path: text for path, text in wanted.items() if not path.is_file() or path.read_text("utf-8") != text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--root", type=Path, default=ROOT)
    args = parser.parse_args()
    stale = outdated(args.root)
    if args.check and stale:
        sys.exit(f"{', '.join(map(str, stale))}: not what results/ says; run python {sys.argv[0]}")
    for path, text in stale.items():
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
