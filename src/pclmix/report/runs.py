"""The rows of a comparison: evaluations of pclmix or nnU-Net, or predictions to score."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pclmix.errors import PclmixError
from pclmix.io.files import read_json
from pclmix.io.volume import ending_of, stem_of
from pclmix.metrics import Summary, evaluate, read_summary
from pclmix.metrics.functional import NAN, Scores, Status
from pclmix.metrics.run import Progress
from pclmix.metrics.summary import CaseScores, from_json

#: File names that are less telling than the name of their folder.
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
