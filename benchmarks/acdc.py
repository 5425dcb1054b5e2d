"""One fold of a real dataset: train, predict, score in columns, and keep what a quoted figure needs.

Columns: raw, tta (flips), component (largest 3D component per class), tta_component; last (raw, the last weights) where
the run keeps an average; one pair (raw and component) for each --offset; both (raw, equation 6 of both decoders) for
PCLMix; net2, net3 and ensemble (raw) where the method trains several networks. OUT gets summary.json (means, commit,
device, minutes, settings), config.yaml, one CSV of per-case values a column and, where snapshots were kept, curve.csv:
raw Dice and HD95 against training minutes. Predictions stay in --work.

    python benchmarks/acdc.py ACDC results/acdc/fast/fold2 --fold 2 --recipe fast --work /tmp/2 engine.keep_every=500
"""

from __future__ import annotations

import argparse
import csv
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pclmix.data.dataset import Dataset
from pclmix.data.volume import write_labels
from pclmix.engine.checkpoint import SNAPSHOTS, load_checkpoint
from pclmix.engine.start import run_training
from pclmix.errors import PclmixError
from pclmix.evaluate import evaluate
from pclmix.evaluate.summary import Summary
from pclmix.files import read_json, write_json
from pclmix.methods.base import find_method
from pclmix.predict.dual import load_uncertain
from pclmix.predict.model import ENSEMBLE, load


class Scores:
    """Predicts and scores the test cases of one fold."""

    def __init__(self, root: Path, fold: int, work: Path, device: str) -> None:
        self.dataset, self.fold, self.work, self.device = Dataset.open(root), fold, work, device

    def predict(self, model: Path, name: str, tta: Any = "none", **which: Any) -> Path:
        predictor = load(model, device=self.device, **which)
        return self._write(name, lambda array, spacing: predictor.predict(array, spacing, tta=tta))

    def predict_both(self, run: Path) -> Path:
        """Labels of the mean of both decoders, equation 6."""
        predictor = load_uncertain(run, device=self.device)

        def labels(array: Any, spacing: Any) -> Any:
            image = predictor.as_image(array, spacing)
            judged = predictor.uncertain_batches(predictor.batches(image), (image.shape[2], image.shape[3]))
            return np.concatenate([q.argmax(1) for _, q in judged]).astype(np.uint8)

        return self._write("both", labels)

    def _write(self, name: str, labels: Callable[[Any, Any], Any]) -> Path:
        folder = self.work / name
        for case in self.dataset.fold(self.fold).test:
            volume = self.dataset.read_image(case)
            found = labels(volume.array, volume.geometry.spacing)
            write_labels(folder / f"{case}{self.dataset.ending}", found, volume.geometry, self.dataset.labels.names)
        return folder

    def evaluate(self, folder: Path, component: bool = False) -> Summary:
        return evaluate(folder, self.dataset.root, fold=self.fold, largest_component=component, workers=8)


def columns_of(scores: Scores, run: Path, offsets: Mapping[str, dict[str, float]]) -> dict[str, Summary]:
    """Every column of a finished run."""
    config = load_checkpoint(run / "last.ckpt", lazy=True)["config"]
    columns = {}
    for name, tta in (("raw", "none"), ("tta", "flip")):
        folder = scores.predict(run, name, tta)
        columns[name] = scores.evaluate(folder)
        columns["component" if name == "raw" else f"{name}_component"] = scores.evaluate(folder, component=True)
    if config["engine"]["ema"] > 0:
        columns["last"] = scores.evaluate(scores.predict(run, "last", last=True))
    for text, offset in offsets.items():
        folder = scores.predict(run, f"offset {text}", offset=offset)
        columns[f"offset {text}"] = scores.evaluate(folder)
        columns[f"offset {text} component"] = scores.evaluate(folder, component=True)
    if config["method"] == "pclmix":
        columns["both"] = scores.evaluate(scores.predict_both(run))
    others = find_method(config["method"]).inference_nets[1:]
    for net in (*others, *([ENSEMBLE] if others else [])):
        columns[net] = scores.evaluate(scores.predict(run, net, net=net))
    return columns


def read_offset(text: str, dataset: Dataset) -> dict[str, float]:
    """LV=2,background=0.5, or none."""
    offset = {}
    for one in text.split(",") if text != "none" else ():
        name, _, value = one.partition("=")
        dataset.labels.index(name, text)
        offset[name] = float(value)
    return offset


def write_curve(scores: Scores, run: Path, path: Path) -> None:
    """Raw Dice and HD95 of every snapshot against the minutes trained until then."""
    rows = []
    for snapshot in sorted((run / SNAPSHOTS).glob("*.ckpt")):
        content = load_checkpoint(snapshot, lazy=True)
        mean = scores.evaluate(scores.predict(snapshot, snapshot.stem)).to_json()["mean"]
        rows.append(
            [content["step"], f"{content['seconds'] / 60:.4f}", f"{mean['Dice']:.5f}", f"{mean['HD95_50']:.4f}"]
        )
    if rows:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["step", "minutes", "Dice", "HD95_50"], *rows])


def with_masks_only(root: Path, view: Path) -> Path:
    """The dataset with training cases that have no dense mask left out of its folds; files are linked."""
    dataset = Dataset.open(root)
    view.mkdir(parents=True)
    for path in root.iterdir():
        if path.name != "splits_final.json":
            (view / path.name).symlink_to(path.resolve())
    folds = read_json(root / "splits_final.json")
    masked = [{**fold, "train": [case for case in fold["train"] if dataset.has_reference(case)]} for fold in folds]
    write_json(view / "splits_final.json", masked)
    return view


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
    parser.add_argument("--masks", action="store_true", help="train on the cases with dense masks alone")
    parser.add_argument("--offset", action="append", default=[], help="a column more, such as LV=2,background=0.5")
    args = parser.parse_intermixed_args()
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} holds an earlier result")
    try:
        offsets = {text: read_offset(text, Dataset.open(args.dataset)) for text in args.offset}
    except (PclmixError, ValueError) as error:
        parser.error(f"--offset: {error}")
    began = time.perf_counter()
    run = args.work / "run"
    finished = run_training(
        with_masks_only(args.dataset, args.work / "dataset") if args.masks else args.dataset,
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
    scores = Scores(args.dataset, args.fold, args.work, args.device)
    columns = columns_of(scores, run, offsets)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, summary in columns.items():
        summary.write_csv(args.out / f"{name}.csv")
    write_curve(scores, run, args.out / "curve.csv")
    state, environment = read_json(run / "run.json"), read_json(run / "environment.json")
    content = {
        "fold": args.fold,
        "training_cases": len(load_checkpoint(run / "last.ckpt", lazy=True)["run"]["cases"]),
        "steps": state["step"],
        "training_minutes": round(state["seconds"] / 60, 3),
        "start_seconds": round(trained - began - state["seconds"], 1),
        "scoring_seconds": round(time.perf_counter() - trained, 1),
        "columns": {
            n: {k: v for k, v in s.to_json().items() if k not in ("cases", "against")} for n, s in columns.items()
        },
        "environment": environment,
    }
    shutil.copy(run / "config.yaml", args.out)
    shutil.copy(run / "metrics.jsonl", args.out)
    write_json(args.out / "summary.json", content)  # last: a folder that has it counts as a run of its group
    for column, values in content["columns"].items():
        shown = {k: f"{v:.4f}" for k, v in values["mean"].items() if isinstance(v, float)}
        classes = {n: round(100 * c["Dice"]["mean"], 2) for n, c in values["classes"].items()}
        print(args.out.name, column, shown, classes, flush=True)
    print({k: content[k] for k in ("steps", "training_minutes", "start_seconds", "scoring_seconds")}, flush=True)


if __name__ == "__main__":
    main()
