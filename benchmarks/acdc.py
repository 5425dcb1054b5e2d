"""One fold of a real dataset: train, predict, score in four columns, and keep what a quoted figure needs.

Columns: raw, tta (flips), component (largest 3D component per class), tta_component. OUT gets summary.json (means,
commit, device, minutes, settings), config.yaml and one CSV of per-case values a column; predictions stay in --work.

    python benchmarks/acdc.py ACDC results/acdc/fast/fold2 --fold 2 --recipe fast --work /tmp/fold2
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

from pclmix.data.dataset import Dataset
from pclmix.data.volume import write_labels
from pclmix.engine.start import run_training
from pclmix.evaluate import evaluate
from pclmix.predict.model import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--fold", type=int, default=1)
    parser.add_argument("--recipe", default="fast")
    parser.add_argument("--method", default="pclmix")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_intermixed_args()
    began = time.perf_counter()
    run = args.work / "run"
    finished = run_training(
        args.dataset,
        run,
        method=args.method,
        recipe=args.recipe,
        overrides=args.overrides,
        fold=args.fold,
        device=args.device,
    )
    if not finished:
        raise SystemExit(130)
    trained = time.perf_counter()
    dataset = Dataset.open(args.dataset)
    predictor = load(run, device=args.device)
    columns = {}
    args.out.mkdir(parents=True, exist_ok=True)
    for name, tta in (("raw", "none"), ("tta", "flip")):
        folder = args.work / name
        for case in dataset.fold(args.fold).test:
            volume = dataset.read_image(case)
            labels = predictor.predict(volume.array, volume.geometry.spacing, tta=tta)
            write_labels(folder / f"{case}{dataset.ending}", labels, volume.geometry, dataset.labels.names)
        for suffix, component in (("", False), ("component", True)):
            column = suffix if name == "raw" and suffix else "_".join(filter(None, (name, suffix)))
            summary = evaluate(folder, args.dataset, fold=args.fold, largest_component=component, workers=8)
            summary.write_csv(args.out / f"{column}.csv")
            columns[column] = {k: v for k, v in summary.to_json().items() if k not in ("cases", "against")}
    state = json.loads((run / "run.json").read_text())
    content = {
        "fold": args.fold,
        "steps": state["step"],
        "training_minutes": round(state["seconds"] / 60, 3),
        "start_seconds": round(trained - began - state["seconds"], 1),
        "scoring_seconds": round(time.perf_counter() - trained, 1),
        "columns": columns,
        "environment": json.loads((run / "environment.json").read_text()),
    }
    (args.out / "summary.json").write_text(json.dumps(content, indent=2) + "\n")
    shutil.copy(run / "config.yaml", args.out)
    shutil.copy(run / "metrics.jsonl", args.out)
    for column, values in columns.items():
        shown = {k: f"{v:.4f}" for k, v in values["mean"].items() if isinstance(v, float)}
        classes = {n: round(100 * c["Dice"]["mean"], 2) for n, c in values["classes"].items()}
        print(args.out.name, column, shown, classes, flush=True)
    print({k: content[k] for k in ("steps", "training_minutes", "start_seconds", "scoring_seconds")}, flush=True)


if __name__ == "__main__":
    main()
