"""PCLMix and partial cross-entropy with one plan, and PCLMix with recipe demo, a few minutes each.

    python benchmarks/plan.py results/plan --work /tmp/plan --minutes 3 hippocampus=SETS/hippocampus phantom

Each dataset is a NAME=FOLDER, or `phantom`, which is made. Its plan is made once, after timing PCLMix on this device;
both methods train with it on all folds but the first and predict that fold, raw; so does PCLMix with the settings of
recipe demo, which know nothing of the data. Runs are one at a time. OUT gets the plan and one CSV of per-case values a
run, plan.json and the table plan.md. What is in plan.json is not measured again.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.inference import load
from pclmix.inference.files import predict_files
from pclmix.io.files import atomic_path, read_json, write_json
from pclmix.metrics.run import evaluate
from pclmix.synth.phantom import make_phantom
from pclmix.training.log import ENVIRONMENT, RUN
from pclmix.training.plan import plan_dataset, training_cases
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training

FOLD = 1
RUNS = {"pclmix": "", "pce": "", "demo": "pclmix"}  #: method; or recipe of that name: method
PHANTOMS = 12  #: patients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("data", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--work", type=Path, required=True, help="runs go here")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    known = args.out / "plan.json"
    rows: list[dict[str, Any]] = read_json(known)["runs"] if known.is_file() else []
    for word in args.data:
        name, _, folder = word.partition("=")
        root = Path(folder) if folder else args.work / name
        if not folder and not root.is_dir():
            make_phantom(root, PHANTOMS, 0)
        for run in RUNS:
            if not any((row["data"], row["run"]) == (name, run) for row in rows):
                rows.append(_measure(args, name, root, run))
                write_json(known, {"minutes": args.minutes, "fold": FOLD, "runs": rows})
                with atomic_path(args.out / "plan.md") as temporary:
                    temporary.write_text(_table(rows), encoding="utf-8")


def _measure(args: argparse.Namespace, name: str, root: Path, named: str) -> dict[str, Any]:
    """Train, predict and score one run."""
    console = Console(stderr=True)
    dataset = Dataset.open(root)
    recipe = args.out / f"{name}.yaml"
    if not recipe.is_file():
        cases = training_cases(dataset, FOLD)
        plan = plan_dataset(dataset, cases, device=args.device, minutes=args.minutes, timed=True)
        recipe.write_text(plan.text, encoding="utf-8")
    run = args.work / "runs" / f"{name}_{named}"
    load_before, started = os.getloadavg()[0], time.time()
    method, settings = (RUNS[named], named) if RUNS[named] else (named, str(recipe))
    request = TrainRequest(
        root, run, method=method, recipe=settings, fold=FOLD, device=args.device, minutes=args.minutes
    )
    if not run_training(request, console):
        raise PclmixError(f"{run} was interrupted; remove it and start again")
    seconds = time.time() - started
    return {
        "data": name,
        "run": named,
        "method": method,
        "seconds": round(seconds, 1),
        "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        **score(run, root, args.device, args.out / f"{name}_{named}.csv"),
    }


def score(run: Path, root: Path, device: str, csv: Path) -> dict[str, Any]:
    """Predict the test cases of the fold and write their scores; the means, steps and environment of the run."""
    predictions = run / "predictions"
    predict_files(load(run, device=device), root, predictions, fold=FOLD).require_good()
    summary = evaluate(predictions, root, fold=FOLD)
    summary.write_csv(csv)
    found = summary.to_json()
    return {
        "steps": read_json(run / RUN)["step"],
        "mean": found["mean"],
        "classes": {key: {m: values[m]["mean"] for m in ("Dice", "HD95")} for key, values in found["classes"].items()},
        "environment": read_json(run / ENVIRONMENT),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| data | run | Dice % | per class | steps | seconds | load |", "|---|---|---:|---|---:|---:|---:|"]
    for row in rows:
        classes = ", ".join(f"{name} {100 * values['Dice']:.1f}" for name, values in row["classes"].items())
        load = " to ".join(f"{value:g}" for value in row["load"])
        known = f"{row['method']}, recipe {row['run']}" if RUNS[row["run"]] else f"{row['method']}, plan"
        cells = (row["data"], known, f"{100 * row['mean']['Dice']:.1f}", classes, row["steps"])
        lines.append(f"| {' | '.join(map(str, cells))} | {row['seconds']:.0f} | {load} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
