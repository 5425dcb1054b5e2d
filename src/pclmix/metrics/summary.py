"""Scores of many cases: means, excluded values, and files."""

from __future__ import annotations

import csv
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt

from pclmix import __version__
from pclmix.errors import PclmixError
from pclmix.io.files import atomic_path, read_json, write_json
from pclmix.io.volume import Unit
from pclmix.metrics.comparison import Comparison
from pclmix.metrics.functional import MEASURES, Scores, Status

#: The column of tables that pools all foreground classes.
AVERAGE = "Avg"
COLUMNS = {**MEASURES, "volume_ml": "volume_ml", "reference_ml": "reference_ml"}
STATUSES: tuple[Status, ...] = ("scored", "empty prediction", "absent", "predicted where absent")

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Statistic:
    """Mean and population standard deviation of the values that are not NaN; `n` counts them, `nan` the others."""

    mean: float
    sd: float
    n: int
    nan: int

    @classmethod
    def of(cls, values: Values) -> Statistic:
        kept = values[~np.isnan(values)]
        if not kept.size:
            return cls(math.nan, math.nan, 0, values.size)
        return cls(float(kept.mean()), float(kept.std()), kept.size, values.size - kept.size)

    def to_json(self) -> dict[str, float | None]:
        return {"mean": _plain(self.mean), "sd": _plain(self.sd), "n": self.n, "nan": self.nan}


@dataclass(frozen=True)
class CaseScores:
    case: str
    classes: dict[str, Scores]  #: by class name


@dataclass(frozen=True, repr=False)
class Summary:
    """The result of `evaluate`. `names` are the foreground classes in label order."""

    names: tuple[str, ...]
    cases: tuple[CaseScores, ...]
    missing: tuple[str, ...] = ()
    without_reference: tuple[str, ...] = ()
    prediction: str = ""
    reference: str = ""
    largest_component: bool = False
    against: Comparison | None = None
    unit: Unit = "mm"  #: of the distances

    def __repr__(self) -> str:
        cases = f"{len(self.cases)} case{'s'[: len(self.cases) != 1]}"
        dice, hd95 = 100 * self.mean("Dice").mean, self.mean("HD95").mean
        return f"Summary({cases}, {', '.join(self.names)}: Dice {dice:.1f} %, HD95 {hd95:.1f} {self.unit})"

    def values(self, measure: str) -> Values:
        """(cases, classes) of one of MEASURES or a volume."""
        field = COLUMNS[measure]
        rows = [[getattr(entry.classes[name], field) for name in self.names] for entry in self.cases]
        return np.array(rows, dtype=np.float64).reshape(len(self.cases), len(self.names))

    def mean(self, measure: str) -> Statistic:
        """Foreground classes and cases pooled."""
        return Statistic.of(self.values(measure).ravel())

    def of_class(self, name: str, measure: str) -> Statistic:
        return Statistic.of(self.values(measure)[:, self.names.index(name)])

    def column(self, column: str, measure: str) -> Statistic:
        """The statistic of a class, or of all classes pooled for AVERAGE."""
        return self.mean(measure) if column == AVERAGE else self.of_class(column, measure)

    def by_case(self, column: str, measure: str) -> dict[str, float]:
        """One number per case: of a class, or for AVERAGE the mean of the case's classes that are not NaN."""
        values = self.values(measure)
        if column == AVERAGE:
            kept = ~np.isnan(values)
            counts = kept.sum(axis=1)
            line = np.where(counts > 0, np.where(kept, values, 0).sum(axis=1) / np.maximum(counts, 1), np.nan)
        else:
            line = values[:, self.names.index(column)]
        return {entry.case: float(value) for entry, value in zip(self.cases, line, strict=True)}

    def empty_predictions(self) -> int:
        """The number of empty predictions of a present class, over cases and classes."""
        return sum(self.statuses(name)["empty prediction"] for name in self.names)

    def statuses(self, name: str) -> dict[str, int]:
        """The number of cases by status: scored, or one of the rules for empty masks."""
        counts = Counter(entry.classes[name].status for entry in self.cases)
        return {status: counts[status] for status in STATUSES}

    def to_json(self) -> dict[str, Any]:
        pooled = {measure: self.mean(measure) for measure in MEASURES}
        return {
            "mean": {measure: _plain(s.mean) for measure, s in pooled.items()},
            "sd": {measure: _plain(s.sd) for measure, s in pooled.items()},
            "n": {measure: s.n for measure, s in pooled.items()},
            "nan": {measure: s.nan for measure, s in pooled.items()},
            "classes": {
                name: {
                    **{measure: self.of_class(name, measure).to_json() for measure in COLUMNS},
                    "statuses": self.statuses(name),
                }
                for name in self.names
            },
            "against": self.against.to_json() if self.against else None,
            "missing": list(self.missing),
            "without_reference": list(self.without_reference),
            "prediction": self.prediction,
            "reference": self.reference,
            "largest_component": self.largest_component,
            "unit": self.unit,
            "version": __version__,
            "cases": [
                {"case": entry.case, "classes": {name: _scores_json(entry.classes[name]) for name in self.names}}
                for entry in self.cases
            ],
        }

    def write_json(self, path: Path) -> None:
        write_json(path, self.to_json())

    def write_csv(self, path: Path) -> None:
        """One row per case and class; NaN is written as nan."""
        with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["case", "class", *COLUMNS, "status", "unit"])
            for entry in self.cases:
                for name in self.names:
                    scores = entry.classes[name]
                    numbers = [f"{getattr(scores, field):.6g}" for field in COLUMNS.values()]
                    writer.writerow([entry.case, name, *numbers, scores.status, self.unit])


def read_summary(path: Path) -> Summary:
    """Read a file of `write_json` or `write_csv`."""
    return _from_csv(path) if path.suffix == ".csv" else from_json(read_json(path), path)


def from_json(content: Any, where: Path) -> Summary:
    try:
        cases = tuple(
            CaseScores(str(entry["case"]), {str(n): _scores(s) for n, s in entry["classes"].items()})
            for entry in content["cases"]
        )
        names = tuple(str(name) for name in content["classes"])
        missing = content.get("missing", [])
        if not isinstance(missing, list) or not all(isinstance(case, str) for case in missing):
            raise ValueError(f"missing={missing!r}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PclmixError(f"{where} is not an evaluation that `pclmix evaluate --out` wrote ({error!r})") from error
    _check(names, cases, where)
    return Summary(
        names,
        cases,
        missing=tuple(missing),
        prediction=str(content.get("prediction", "")),
        reference=str(content.get("reference", "")),
        largest_component=bool(content.get("largest_component", False)),
        unit=_unit(content.get("unit", "mm"), where),
    )


def _from_csv(path: Path) -> Summary:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        table: dict[str, dict[str, Scores]] = {}
        for row in rows:
            table.setdefault(row["case"], {})[row["class"]] = _scores(row)
    except FileNotFoundError:
        raise PclmixError(f"{path} does not exist") from None
    except (KeyError, TypeError, ValueError) as error:
        raise PclmixError(f"{path} is not a table that `pclmix evaluate --csv` wrote ({error!r})") from error
    names = tuple(dict.fromkeys(row["class"] for row in rows))
    cases = tuple(CaseScores(case, classes) for case, classes in table.items())
    _check(names, cases, path)
    units = {row.get("unit") or "mm" for row in rows}  # older files lack the column and are in mm
    if len(units) > 1:
        raise PclmixError(f"{path} mixes the units {' and '.join(sorted(units))}")
    return Summary(names, cases, unit=_unit(units.pop(), path))


def _unit(value: Any, where: Path) -> Unit:
    if value not in get_args(Unit):
        raise PclmixError(f"{where}: unit {value!r} is not one of {', '.join(get_args(Unit))}")
    return cast(Unit, value)


def _check(names: tuple[str, ...], cases: tuple[CaseScores, ...], where: Path) -> None:
    if not cases or not names:
        raise PclmixError(f"{where} holds no cases")
    for entry in cases:
        if set(entry.classes) != set(names):
            raise PclmixError(f"{where}: case '{entry.case}' has classes {sorted(entry.classes)}, not {list(names)}")


def _scores(row: Any) -> Scores:
    if row["status"] not in STATUSES:
        raise ValueError(f"status {row['status']!r}")
    numbers = {field: math.nan if row[column] is None else float(row[column]) for column, field in COLUMNS.items()}
    return Scores(status=cast(Status, row["status"]), **numbers)


def _scores_json(scores: Scores) -> dict[str, Any]:
    values: dict[str, Any] = {column: _plain(getattr(scores, field)) for column, field in COLUMNS.items()}
    return {**values, "status": scores.status}


def _plain(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value
