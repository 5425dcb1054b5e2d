"""Groups of runs under results/acdc: what `benchmarks/acdc.py` kept of each, and what about.json says of them all.

about.json: `title`, `note`; `order` of the runs and `text`, their labels; `column` (raw unless said) that the table
is made of; `against`, the run that others are tested against; `pooled`, folds of one recipe, shown together; `readme`,
also shown there, with the `caveat`; `place`, a number to sort by; `borrowed`, runs of other groups that stand in this
one too, as name: group/run; `columns`, for a borrowed run that is read otherwise there, as name: {column: its file's
stem}: it has these columns alone, and no curve; `shared`, the runs shared their device, so that their minutes say
nothing. Only `title` must be there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from pclmix.errors import PclmixError
from pclmix.evaluate import Summary, read_summary
from pclmix.evaluate.metrics import Scores, Status
from pclmix.evaluate.summary import COLUMNS as FIELDS
from pclmix.evaluate.summary import CaseScores
from pclmix.methods.base import find_method

#: Per-case files of a run, in the order of the tables.
COLUMNS = {
    "raw": "raw",
    "tta": "flips",
    "component": "largest component",
    "tta_component": "flips, component",
    "last": "weights not averaged",
    "both": "both decoders",
    "offset none": "no offset",
    "offset none component": "no offset, component",
    "net2": "second network",
    "net3": "third network",
    "nets_mean": "mean of the networks' scores",
    "ensemble": "mean of the networks' predictions",
}
CURVE = "curve.csv"
NETWORKS = ("raw", "net2", "net3")
#: Where networks differ about a case, the last of their statuses here is that of the mean.
BY_WEIGHT: tuple[Status, ...] = ("absent", "scored", "empty prediction", "predicted where absent")


@dataclass(frozen=True)
class Entry:
    """One run: its folder, its label in tables, summary.json and config.yaml."""

    name: str
    label: str
    folder: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    files: Mapping[str, str] | None = None  #: columns and their files, where not each file is a column of its name

    @property
    def columns(self) -> list[str]:
        """Those with a file, and `nets_mean` where the networks of one run were scored alone."""
        if self.files is not None:
            return list(self.files)
        found = {path.stem for path in self.folder.glob("*.csv") if path.name != CURVE}
        if found.issuperset(NETWORKS):
            found.add("nets_mean")
        return [*(c for c in COLUMNS if c in found), *sorted(found.difference(COLUMNS))]

    def scores(self, column: str) -> Summary:
        path = self.folder / f"{(self.files or {}).get(column, column)}.csv"
        if column == "nets_mean" and not path.is_file():
            return mean_of_networks([self.scores(network) for network in NETWORKS])
        return read_summary(path)

    def reported(self, column: str) -> str:
        """The column a comparison takes: of several networks no single one is chosen, their mean stands for raw."""
        return "nets_mean" if column == "raw" and "nets_mean" in self.columns else column

    @property
    def curve(self) -> Path | None:
        path = self.folder / CURVE
        return path if self.files is None and path.is_file() else None


@dataclass(frozen=True)
class Group:
    """Runs that belong in one table; `absent` are in the order of about.json and have no folder."""

    name: str
    about: dict[str, Any]
    runs: tuple[Entry, ...]
    absent: tuple[str, ...]

    @property
    def column(self) -> str:
        return str(self.about.get("column", "raw"))

    @property
    def pooled(self) -> bool:
        return bool(self.about.get("pooled"))

    @property
    def against(self) -> str | None:
        """The label of the run that others are tested against."""
        return next((run.label for run in self.runs if run.name == self.about.get("against")), None)


def read_groups(root: Path) -> list[Group]:
    """Every group with a run: first by `place`, then pooled ones, those for README, the others by name."""
    found = [read_group(path) for path in sorted((root / "results" / "acdc").glob("*/about.json"))]

    def place(group: Group) -> tuple[Any, ...]:
        return group.about.get("place", 99), not group.pooled, not group.about.get("readme"), group.name

    return sorted((group for group in found if group.runs), key=place)


def read_group(about_path: Path) -> Group:
    about = json.loads(about_path.read_text(encoding="utf-8"))
    folder = about_path.parent
    kept = {path.parent.name: path.parent for path in folder.glob("*/summary.json")}
    kept |= {name: folder.parent / where for name, where in about.get("borrowed", {}).items()}
    order = list(about.get("order", ()))
    names = [*(n for n in order if n in kept), *sorted(kept.keys() - set(order))]
    texts, columns = about.get("text", {}), about.get("columns", {})
    runs = tuple(read_entry(n, kept[n], str(texts.get(n, n)), columns.get(n)) for n in names)
    labels = [run.label for run in runs]
    for label in labels:
        if labels.count(label) > 1:
            raise PclmixError(f"{about_path}: two runs are called '{label}'; give each its own text")
    return Group(folder.name, about, runs, tuple(n for n in order if n not in kept))


def read_entry(name: str, folder: Path, label: str, files: Mapping[str, str] | None = None) -> Entry:
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return Entry(name, label, folder, summary, yaml.safe_load((folder / "config.yaml").read_text("utf-8")), files)


def pool(entries: Sequence[Entry], column: str) -> Summary:
    """The cases of several folds together."""
    parts = [entry.scores(column) for entry in entries]
    cases = tuple(case for part in parts for case in part.cases)
    if len({case.case for case in cases}) < len(cases):
        raise PclmixError(f"{entries[0].folder.parent}: pooled runs share cases; pool one run of each fold")
    return Summary(parts[0].names, cases)


def shared_columns(entries: Sequence[Entry]) -> list[str]:
    return [column for column in entries[0].columns if all(column in entry.columns for entry in entries)]


def mean_of_networks(parts: Sequence[Summary]) -> Summary:
    """Each case and class with the mean of the networks' values; empty where any network's prediction was."""

    def mean(scores: Sequence[Scores]) -> Scores:
        numbers = {}
        for field in FIELDS.values():
            known = [v for s in scores if not math.isnan(v := getattr(s, field))]
            numbers[field] = fmean(known) if known else math.nan
        return Scores(status=max((s.status for s in scores), key=BY_WEIGHT.index), **numbers)

    by_case = [{entry.case: entry.classes for entry in part.cases} for part in parts]
    names = parts[0].names
    cases = tuple(CaseScores(c, {n: mean([part[c][n] for part in by_case]) for n in names}) for c in by_case[0])
    return Summary(names, cases)


def upper_bounds(group: Group) -> tuple[str, ...]:
    """Labels of runs that saw dense masks, where others of the group did not: they are not ranked."""
    dense = tuple(run.label for run in group.runs if find_method(run.config["method"]).needs == "dense masks")
    return dense if len(dense) < len(group.runs) else ()
