"""Runs of a real dataset, many in one process: train, predict, score in columns, and keep the files of quoted figures.

    python benchmarks/acdc.py ACDC results/acdc --work /tmp/runs --maag maag_split.json --deadline 540 \\
        --run rounds recipe=rounds folds=1,2 seeds=0,1 \\
        --run rounds_maag recipe=rounds folds=maag \\
        --run full recipe=rounds method=full folds=1,2,maag masks=true engine.iterations=24000

--run ROW WORD... stands for a run of each fold and seed; it lands in OUT/ROW/foldN-seedS or maag-seedS as soon as it is
scored, and is skipped where it is there already. Words: recipe, method, folds, seeds, masks=true (train on the cases
with dense masks alone), expect (seconds that one takes); net and words with a dot are settings of `pclmix train`.
--maag adds the split of Valvano et al., a file of patient numbers: fold `maag` trains on its train70, `maag35` on its
train35, both are tested on its test. --deadline starts no run that would not be finished by then: a run is expected to
take as long as the longest before it of its row, at first `expect`. A run that fails is reported and the others go on.
--archive FILE.tar.gz holds the runs that this command has finished, and is written anew after each; unpacked into OUT
elsewhere, they count as done there.

Columns: raw, tta (flips), component (largest 3D component per class), tta_component; last (raw, the last weights) where
the run keeps an average; both (raw, equation 6 of both decoders) for PCLMix; net2, net3 and ensemble (raw) where the
method trains several networks. A folder gets summary.json (means, commit, device, minutes, settings), config.yaml, one
CSV of per-case values a column and, where snapshots were kept, curve.csv: raw Dice and HD95 against training minutes.
Predictions stay in --work.
"""

from __future__ import annotations

import argparse
import csv
import gc
import re
import shutil
import tarfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pclmix.data.dataset import Dataset, patient_of
from pclmix.errors import PclmixError
from pclmix.inference.torch import ENSEMBLE, load
from pclmix.io.files import atomic_path, read_json, write_json
from pclmix.io.volume import write_labels
from pclmix.methods.base import find_method
from pclmix.metrics import evaluate
from pclmix.metrics.summary import Summary
from pclmix.training.checkpoint import SNAPSHOTS, load_checkpoint
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training

MAAG = {"maag": "train70", "maag35": "train35"}  #: fold by name: the key of its training patients
ALL = "raw,tta,component,tta_component,last,both,nets"


class Scores:
    """Predicts and scores the test cases of one fold."""

    def __init__(self, root: Path, fold: int, work: Path, device: str) -> None:
        self.dataset, self.fold, self.work, self.device = Dataset.open(root), fold, work, device

    def predict(self, model: Path, name: str, tta: Any = "none", **which: Any) -> Path:
        predictor = load(model, device=self.device, **which)
        return self._write(name, lambda array, spacing: predictor.predict(array, spacing, tta=tta))

    def predict_both(self, run: Path) -> Path:
        """Labels of the mean of both decoders, equation 6."""
        predictor = load(run, device=self.device, precision="32")

        def labels(array: Any, spacing: Any) -> Any:
            judged = predictor.uncertain_batches(predictor.batches(array), array.shape[2:])
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


def columns_of(scores: Scores, run: Path, wanted: set[str]) -> dict[str, Summary]:
    """The requested columns of a finished run."""
    settings = load_checkpoint(run / "last.ckpt", lazy=True).settings
    columns = {}
    for name, tta in (("raw", "none"), ("tta", "flip")):
        both = {name: False, "component" if name == "raw" else f"{name}_component": True}
        if wanted & both.keys():
            folder = scores.predict(run, name, tta)
            columns |= {n: scores.evaluate(folder, component) for n, component in both.items() if n in wanted}
    if settings.engine.ema > 0 and "last" in wanted:
        columns["last"] = scores.evaluate(scores.predict(run, "last", last=True))
    if settings.method == "pclmix" and "both" in wanted:
        columns["both"] = scores.evaluate(scores.predict_both(run))
    others = find_method(settings.method).inference_nets[1:]
    for net in (*others, *([ENSEMBLE] if others else [])):
        if "nets" in wanted:
            columns[net] = scores.evaluate(scores.predict(run, net, net=net))
    return columns


def write_curve(scores: Scores, run: Path, path: Path) -> None:
    """Raw Dice and HD95 of every snapshot against the minutes trained until then."""
    rows = []
    for snapshot in sorted((run / SNAPSHOTS).glob("*.ckpt")):
        checkpoint = load_checkpoint(snapshot, lazy=True)
        mean = scores.evaluate(scores.predict(snapshot, snapshot.stem)).to_json()["mean"]
        rows.append(
            [checkpoint.step, f"{checkpoint.seconds / 60:.4f}", f"{mean['Dice']:.5f}", f"{mean['HD95_50']:.4f}"]
        )
    if rows:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["step", "minutes", "Dice", "HD95_50"], *rows])


def with_fold(root: Path, view: Path, name: str, maag: Path | None, masks: bool = False) -> tuple[Path, int]:
    """A linked copy of the dataset with the folds that contain `name`, and its number.

    With `masks` only cases with dense masks are trained on.
    """
    dataset, number = Dataset.open(root), 1
    if name in MAAG and maag is not None:
        split, of = read_json(maag), {case: number_of(dataset, case) for case in dataset.cases}
        keys = {"train": MAAG[name], "val": "test"}
        folds = [{part: [case for case in dataset.cases if of[case] in split[key]] for part, key in keys.items()}]
        view = view / name
    elif name.isdecimal():
        folds = [{"train": list(fold.train), "val": list(fold.test)} for fold in dataset.splits()]
        view, number = view / "folds", int(name)
    else:
        raise PclmixError(f"folds={name}: a number, maag or maag35 is needed, and for these --maag")
    if masks:
        view = view.with_name(f"{view.name}-masks")
        for fold in folds:
            fold["train"] = [case for case in fold["train"] if dataset.has_reference(case)]
    view.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        if path.name != "splits_final.json" and not (view / path.name).exists():
            (view / path.name).symlink_to(path.resolve())
    write_json(view / "splits_final.json", folds)
    return view, number


def number_of(dataset: Dataset, case: str) -> int:
    """The number of a case's patient."""
    return int(re.sub(r"\D", "", patient_of(case, dataset.patient_pattern)) or 0)


@dataclass(frozen=True)
class Job:
    """One run: a fold by name and a seed of a row."""

    row: str
    fold: str
    seed: int
    words: Mapping[str, str]
    overrides: tuple[str, ...]

    @property
    def place(self) -> Path:
        fold = self.fold if self.fold.startswith("maag") else f"fold{self.fold}"
        return Path(self.row) / f"{fold}-seed{self.seed}"


def jobs_of(rows: Sequence[Sequence[str]]) -> list[Job]:
    """The runs of all --run, in order; each row by seed, then by fold."""
    jobs = []
    for row, *given in rows:
        words = {"folds": "1", "seeds": "0", **dict(word.split("=", 1) for word in given if "=" in word)}
        settings = tuple(word for word in given if is_setting(word.partition("=")[0]))
        own = {name: value for name, value in words.items() if not is_setting(name)}
        unknown = own.keys() - {"recipe", "method", "folds", "seeds", "masks", "expect"}
        if unknown or any("=" not in word for word in given):
            raise SystemExit(f"--run {row} {' '.join(given)}: unknown word {', '.join(unknown) or 'without ='}")
        folds, seeds = own["folds"].split(","), own["seeds"].split(",")
        jobs += [Job(row, fold, int(seed), own, settings) for seed in seeds for fold in folds]
    return jobs


def is_setting(name: str) -> bool:
    return "." in name or name == "net"


def run_job(job: Job, args: argparse.Namespace) -> None:
    """Train, score and write OUT/ROW/RUN."""
    began = time.perf_counter()
    work, out = args.work / job.place, args.out / job.place
    root, fold = with_fold(args.dataset, args.work, job.fold, args.maag, job.words.get("masks") == "true")
    run = work / "run"
    request = TrainRequest(
        root,
        run,
        method=job.words.get("method", "pclmix"),
        recipe=job.words.get("recipe", "fast"),
        overrides=(*job.overrides, f"seed={job.seed}"),
        fold=fold,
        device=args.device,
        resume=run.exists(),  # temporary files of killed processes
    )
    if not run_training(request):
        raise SystemExit(130)
    trained = time.perf_counter()
    scores = Scores(root, fold, work, args.device)
    columns = columns_of(scores, run, set(args.columns.split(",")))
    out.mkdir(parents=True, exist_ok=True)
    for name, summary in columns.items():
        summary.write_csv(out / f"{name}.csv")
    write_curve(scores, run, out / "curve.csv")
    state, environment = read_json(run / "run.json"), read_json(run / "environment.json")
    content = {
        "fold": fold,
        "split": job.fold,
        "training_cases": len(load_checkpoint(run / "last.ckpt", lazy=True).run.cases),
        "steps": state["step"],
        "training_minutes": round(state["seconds"] / 60, 3),
        "start_seconds": round(trained - began - state["seconds"], 1),
        "scoring_seconds": round(time.perf_counter() - trained, 1),
        "columns": {
            n: {k: v for k, v in s.to_json().items() if k not in ("cases", "against")} for n, s in columns.items()
        },
        "environment": environment,
    }
    shutil.copy(run / "config.yaml", out)
    shutil.copy(run / "metrics.jsonl", out)
    write_json(out / "summary.json", content)  # last, since it marks the run as complete
    for column, values in content["columns"].items():
        shown = {k: f"{v:.4f}" for k, v in values["mean"].items() if isinstance(v, float)}
        classes = {n: round(100 * c["Dice"]["mean"], 2) for n, c in values["classes"].items()}
        print(job.place, column, shown, classes, flush=True)
    print(
        job.place,
        {k: content[k] for k in ("steps", "training_minutes", "start_seconds", "scoring_seconds")},
        flush=True,
    )


def pack(out: Path, places: Sequence[Path], archive: Path) -> None:
    """The folders OUT/PLACE as one file."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(archive) as temporary, tarfile.open(temporary, "w:gz") as file:
        for place in places:
            file.add(out / place, str(place))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("out", type=Path, help="gets a folder for each ROW")
    parser.add_argument("--run", nargs="+", action="append", required=True, metavar=("ROW", "WORD"), dest="rows")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--maag", type=Path, help="file of the split of Valvano et al.")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--archive", type=Path)
    parser.add_argument("--columns", default=ALL, help=f"default: {ALL}")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    began, took, failed, finished = time.perf_counter(), dict[str, float](), 0, list[Path]()
    for job in jobs_of(args.rows):
        if (args.out / job.place / "summary.json").is_file():
            print(job.place, "is there already", flush=True)
            continue
        expected = took.get(job.row, float(job.words.get("expect", 0)))
        passed = time.perf_counter() - began
        if passed + expected > args.deadline:
            print(job.place, f"not started: {passed:.0f} s + {expected:.0f} s are past the deadline", flush=True)
            continue
        try:
            run_job(job, args)
            finished.append(job.place)
            if args.archive:
                pack(args.out, finished, args.archive)
        except Exception:  # reported; the other runs continue
            print(job.place, "failed:", traceback.format_exc(), flush=True)
            failed += 1
        took[job.row] = max(expected, time.perf_counter() - began - passed)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
