"""A planned training against nnU-Net with its ignore label, in the same minutes: PCLMix, dense masks, nnU-Net.

    python benchmarks/nnunet.py results/nnunet --work /tmp/nnunet --minutes 4 --nnunet "bash nnunet_run.sh WHEELS" \\
        hippocampus=SETS/hippocampus fundus=SETS/fundus

Each dataset is NAME=FOLDER. All but the test cases of fold 1 train; those are predicted and scored as they are
and with the largest component of each class. `pclmix` plans from the data and ends so many minutes after its command;
`full` trains on the dense masks by the same plan. --nnunet is a command that is called with a dataset and a work
folder, and with FOLD=0 and MINUTES in its environment; it leaves label maps in the folder's `predictions`. Its minutes
are those of training alone.

OUT/NAME/METHOD gets raw.csv, component.csv (per case) and summary.json; methods that have it are skipped. --deadline
starts nothing that would not be finished by then; --archive FILE.tar.gz holds what this command has measured. Words
with a dot are settings of both trainings, such as encoder.weights=FILE.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from acdc import pack
from pclmix.errors import PclmixError
from pclmix.inference import load
from pclmix.inference.files import predict_files
from pclmix.io.files import read_json, write_json
from pclmix.metrics import evaluate
from pclmix.nets.segmenter import device_kind
from pclmix.training.log import CONFIG, ENVIRONMENT, PLAN, RUN, environment
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training

FOLD = 1
METHODS = ("pclmix", "full", "nnunet")
_BESIDE = 90.0  #: seconds for starting, predicting and scoring, in addition to the minutes


def train(args: argparse.Namespace, root: Path, method: str, work: Path) -> tuple[Path, dict[str, Any]]:
    """One of our trainings: its predictions and its summary."""
    run, plan = work / method / "run", work / "pclmix" / "run" / PLAN
    if method == "full" and not plan.is_file():
        raise PclmixError(f"{plan} does not exist: `full` trains by the plan of `pclmix`, which comes first")
    request = TrainRequest(
        root,
        run,
        method=method,
        recipe=str(plan) if method == "full" else None,
        overrides=args.overrides,
        fold=FOLD,
        device=args.device,
        minutes=args.minutes,
    )
    if not run_training(request, Console(stderr=True)):
        raise SystemExit(130)
    status = read_json(run / RUN)
    about = {"steps": status["step"], "training_seconds": status["seconds"]}
    about |= {"whole_seconds": round(time.time() - request.started, 1), "environment": read_json(run / ENVIRONMENT)}
    predictions = work / method / "predictions"
    predict_files(load(run, device=args.device), root, predictions, fold=FOLD).require_good()
    return predictions, about


def train_nnunet(args: argparse.Namespace, root: Path, work: Path) -> tuple[Path, dict[str, Any]]:
    folder = work / "nnunet"
    began = time.perf_counter()
    command = [*shlex.split(args.nnunet), str(root), str(folder)]
    options = {"FOLD": str(FOLD - 1), "MINUTES": f"{args.minutes:g}", "DEVICE": device_kind(args.device)}
    options |= {"PREDICT": "val"}
    with (work / "nnunet.txt").open("w") as said:
        code = subprocess.run(command, env={**os.environ, **options}, stdout=said, stderr=said).returncode
    if code:
        raise PclmixError(f"exit code {code}: {(work / 'nnunet.txt').read_text()[-1500:]}")
    seconds = round(time.perf_counter() - began, 1)
    about = {"whole_seconds": seconds, "environment": environment(device_kind(args.device))}
    return folder / "predictions", about


def measure(args: argparse.Namespace, name: str, root: Path, method: str) -> None:
    work, out = args.work / name, args.out / name / method
    work.mkdir(parents=True, exist_ok=True)
    predictions, about = train_nnunet(args, root, work) if method == "nnunet" else train(args, root, method, work)
    columns: dict[str, Mapping[str, Any]] = {}
    out.mkdir(parents=True, exist_ok=True)
    for column, component in (("raw", False), ("component", True)):
        summary = evaluate(predictions, root, fold=FOLD, largest_component=component, workers=8)
        if summary.missing:
            raise PclmixError(f"{predictions}: no prediction of {', '.join(summary.missing)}")
        summary.write_csv(out / f"{column}.csv")
        columns[column] = {k: v for k, v in summary.to_json().items() if k in ("mean", "classes")}
    if method != "nnunet":
        shutil.copy(work / method / "run" / CONFIG, out)
    write_json(out / "summary.json", {"minutes": args.minutes, "fold": FOLD, **about, "columns": columns})
    shown = {
        column: {k: round(v, 4) for k, v in found["mean"].items() if v is not None} for column, found in columns.items()
    }
    print(name, method, about.get("steps", ""), f"{about['whole_seconds']:.0f} s", shown, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="+", metavar="NAME=FOLDER|KEY=VALUE")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--nnunet", default="", metavar="COMMAND")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--archive", type=Path)
    args = parser.parse_intermixed_args()
    args.overrides = [word for word in args.words if "." in word.partition("=")[0] or word.startswith("net=")]
    args.words = [word for word in args.words if word not in args.overrides]
    if "nnunet" in args.methods and not args.nnunet:
        parser.error("--nnunet COMMAND is needed, or --methods without nnunet")
    began, failed, done = time.perf_counter(), 0, list[Path]()
    for word in args.words:
        name, _, folder = word.partition("=")
        for method in args.methods:
            if (args.out / name / method / "summary.json").is_file():
                print(name, method, "is there already", flush=True)
                continue
            if time.perf_counter() - began + 60 * args.minutes + _BESIDE > args.deadline:
                print(name, method, "not started: it would end past the deadline", flush=True)
                continue
            try:
                measure(args, name, Path(folder).resolve(), method)
                done.append(Path(name) / method)
                if args.archive:
                    pack(args.out, done, args.archive)
            except Exception:  # reported; the others continue
                print(name, method, "failed:", traceback.format_exc(), flush=True)
                failed += 1
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
