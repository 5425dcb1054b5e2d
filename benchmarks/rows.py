"""Every method on the phantom: the demo's recipe for the same number of steps, on a CPU.

Small (64 x 64, a thin network, six patients for training): the order of methods holds for this setting only. For real
data see benchmarks/acdc.py and results/acdc/methods. Runs that --work holds are not repeated. OUT gets one CSV of
per-case values per method, rows.json with the settings, and the table in rows.md.

    python benchmarks/rows.py results/rows --work /tmp/rows --iterations 300
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from pclmix.io.files import read_json, write_json
from pclmix.methods.base import METHODS, load_all
from pclmix.metrics import read_summary
from pclmix.report import tables
from pclmix.report.tables import Run
from pclmix.studies.demo import DATASET, RECIPE, make_dataset
from pclmix.studies.study import EVALUATION
from pclmix.training.log import ENVIRONMENT

FIRST, UNRANKED = "pclmix", "full"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="the dataset and the runs go here")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", help="all of them if not given")
    args = parser.parse_args()
    console = Console(stderr=True)
    load_all()
    known = METHODS.names()
    methods = args.methods or [FIRST, *sorted(set(known) - {FIRST, UNRANKED}), UNRANKED]
    if not (args.work / DATASET).is_dir():
        make_dataset(args.work / DATASET, args.seed)
    for method in methods:
        train(args.work, method, args.iterations, args.seed, console)
    made = [read_json(args.work / method / "fold1" / ENVIRONMENT) for method in methods]
    if len({environment["commit"] for environment in made}) > 1:
        sys.exit(f"{args.work} holds runs of several commits; give another --work")
    args.out.mkdir(parents=True, exist_ok=True)
    for method in methods:
        read_summary(args.work / method / EVALUATION).write_csv(args.out / f"{method}.csv")
    environment = {key: value for key, value in made[0].items() if key != "command"}
    settings = {"recipe": RECIPE, "iterations": args.iterations, "seed": args.seed, "methods": methods}
    write_json(args.out / "rows.json", {**settings, "environment": environment})
    runs = [Run(method, read_summary(args.out / f"{method}.csv")) for method in methods]
    table = tables.markdown(tables.build(runs, against=methods[0], unranked={UNRANKED}.intersection(methods)))
    (args.out / "rows.md").write_text(table, encoding="utf-8")
    print(table)


def train(work: Path, method: str, iterations: int, seed: int, console: Console) -> None:
    console.print(f"{method}: {iterations} steps", highlight=False)
    words = ["--method", method, "--recipe", RECIPE, "--folds", "1", "--iterations", str(iterations)]
    command = ["crossval", str(work / DATASET), "--out", str(work / method), *words, "--seed", str(seed)]
    # crossval skips finished folds and refuses a folder with other settings.
    done = subprocess.run([sys.executable, "-m", "pclmix", *command, "--device", "cpu"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
