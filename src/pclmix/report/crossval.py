"""Cross-validation: train, predict and evaluate each fold, then one summary over all cases. Every part resumes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pclmix.config import load_config
from pclmix.data.dataset import SPLITS, Dataset
from pclmix.engine.prepare import training_cases
from pclmix.engine.start import run_training
from pclmix.errors import PclmixError
from pclmix.evaluate import Summary, evaluate, read_summary
from pclmix.files import read_json, refuse_existing, require_writable, write_json
from pclmix.predict.base import TTA, warn_of_flips
from pclmix.predict.files import predict_files
from pclmix.predict.model import load

SETTINGS, EVALUATION, CASES, PREDICTIONS = "crossval.json", "evaluation.json", "cases.csv", "predictions"


@dataclass(frozen=True)
class Settings:
    """What all folds share; a folder goes on only with the same ones."""

    dataset: str
    method: str | None
    recipe: str | None
    overrides: tuple[str, ...]
    tta: TTA = "none"
    largest_component: bool = False


@dataclass(frozen=True)
class CrossValidation:
    """Summaries of the folds that have references, by fold, and of all their cases; None where there are none."""

    folds: dict[int, Summary]
    summary: Summary | None


def parse_folds(text: str, count: int) -> list[int]:
    """Folds such as `1-5`, `1,3` or `all` of a dataset that has `count`.

    >>> parse_folds("1-2,4", 5), parse_folds("all", 3)
    ([1, 2, 4], [1, 2, 3])
    """
    if text == "all":
        return list(range(1, count + 1))
    folds: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise PclmixError(f"--folds {text}: '{part}' is not a fold; write 1-5, 1,3 or all")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise PclmixError(f"--folds {text}: '{part.strip()}' runs backwards; write {last}-{first}")
        if not 1 <= first <= last <= count:
            raise PclmixError(
                f"--folds {text}: the dataset has folds 1 to {count}; `pclmix split` makes others, "
                "at most one for each patient"
            )
        folds.update(range(first, last + 1))
    return sorted(folds)


def cross_validate(
    dataset: Path,
    out: Path,
    *,
    folds: str = "all",
    method: str | None = None,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    device: str = "auto",
    devices: int = 1,
    tta: TTA = "none",
    largest_component: bool = False,
    console: Console | None = None,
) -> CrossValidation | None:
    """Run the folds one after the other into OUT/fold1, OUT/fold2, ...; None when somebody interrupted.

    Called again with the same settings it goes on where it stopped; other folds may be added so. Each fold gets
    predictions/, evaluation.json and cases.csv, OUT gets the two files over all cases of all folds run so far.
    """
    console = console or Console(stderr=True)
    dataset, out = Path(dataset), Path(out)
    data = Dataset.open(dataset)
    chosen = parse_folds(folds, len(data.splits()))
    _require_disjoint(data, chosen)
    for fold in chosen:
        training_cases(data, fold)  # refused before anything is written
    settings = Settings(str(dataset.resolve()), method, recipe, tuple(overrides), tta, largest_component)
    if tta == "flip" and load_config(recipe or "fast", method, overrides).augment.quarter_turns == 0:
        warn_of_flips("this model is trained")
    _require_same(out, settings)
    for fold in chosen:
        run = out / f"fold{fold}"
        if (run / EVALUATION).is_file():
            console.print(f"fold {fold} is done already", highlight=False)
            continue
        console.rule(f"fold {fold}")
        if not _train(settings, run, fold, device, devices, console):
            return None
        outcome = predict_files(
            load(run, device=device),
            dataset,
            run / PREDICTIONS,
            fold=fold,
            tta=tta,
            largest_component=largest_component,
        )
        outcome.require_good()
        if not any(data.has_reference(case) for case in data.fold(fold).test):
            console.print(f"fold {fold}: no test case has a dense mask, so it is not scored", highlight=False)
            continue
        summary = evaluate(run / PREDICTIONS, dataset, fold=fold, largest_component=largest_component)
        summary.write_csv(run / CASES)
        summary.write_json(run / EVALUATION)
    return _summarise(data, out)


def _train(settings: Settings, run: Path, fold: int, device: str, devices: int, console: Console) -> bool:
    """True when finished, False when interrupted."""
    dataset = Path(settings.dataset)
    if devices == 1:
        return run_training(
            dataset,
            run,
            method=settings.method,
            recipe=settings.recipe,
            overrides=settings.overrides,
            fold=fold,
            resume=True,
            expected=False,
            device=device,
            console=console,
        )
    # Processes that train together live as long as their command, so each fold is a command of its own.
    options = {"--method": settings.method, "--recipe": settings.recipe, "--fold": fold, "--out": run}
    given = [text for key, value in options.items() if value is not None for text in (key, str(value))]
    command = [sys.executable, "-m", "pclmix", "train", str(dataset), *settings.overrides, *given]
    again = ["--resume"] if run.exists() else []
    done = subprocess.run([*command, "--device", device, "--devices", str(devices), *again])
    if done.returncode not in (0, 130):
        raise PclmixError(f"training of fold {fold} stopped with exit code {done.returncode}; its message is above")
    return done.returncode == 0


def _require_disjoint(data: Dataset, folds: Sequence[int]) -> None:
    seen: dict[str, int] = {}
    for fold in folds:
        for case in data.fold(fold).test:
            if case in seen:
                raise PclmixError(
                    f"{data.root / SPLITS}: case '{case}' is tested by fold {seen[case]} and fold {fold}; "
                    "a summary over all cases needs each case once"
                )
            seen[case] = fold


def _require_same(out: Path, settings: Settings) -> None:
    """A new folder gets the settings; one that has them must have the same."""
    now: dict[str, Any] = {**asdict(settings), "overrides": list(settings.overrides)}
    path = out / SETTINGS
    if not path.is_file():
        refuse_existing(out)
    require_writable(out)
    if not any(out.glob("fold*")):  # nothing was trained yet, perhaps because the settings were wrong
        write_json(path, now)
        return
    then = read_json(path)
    changed = [key for key in now if not isinstance(then, dict) or then.get(key) != now[key]]
    if changed:
        shown = f"{changed[0]}: {then.get(changed[0]) if isinstance(then, dict) else None} then, {now[changed[0]]} now"
        raise PclmixError(
            f"{out} is a cross-validation with other settings ({shown}); repeat them or choose another --out"
        )


def _summarise(data: Dataset, out: Path) -> CrossValidation:
    found = {fold: out / f"fold{fold}" / EVALUATION for fold in range(1, len(data.splits()) + 1)}
    folds = {fold: read_summary(path) for fold, path in found.items() if path.is_file()}
    if not folds:
        return CrossValidation({}, None)
    cases = sorted((entry for part in folds.values() for entry in part.cases), key=lambda entry: entry.case)
    summary = Summary(
        data.labels.foreground,
        tuple(cases),
        prediction=str(out),
        reference=str(data.root),
        largest_component=next(iter(folds.values())).largest_component,
    )
    summary.write_csv(out / CASES)
    summary.write_json(out / EVALUATION)
    return CrossValidation(folds, summary)
