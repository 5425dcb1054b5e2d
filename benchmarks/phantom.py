"""Difficulty of the phantom: full supervision, partial cross-entropy and PCLMix with the demo's recipe and seconds.

    python benchmarks/phantom.py results/phantom --work /tmp/demo

Run it with the --work of benchmarks/demo.py and what is finished there is used as it is. OUT gets phantom.json, a table
phantom.md, and one CSV of per-case values for each seed and method.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from pclmix.io.files import atomic_path, read_json, write_json
from pclmix.studies.demo import DATASET, RECIPE, SECONDS, make_dataset, train_and_score
from pclmix.training.log import ENVIRONMENT

METHODS = ("full", "pce", "pclmix")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="datasets and runs go here")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=SECONDS)
    args = parser.parse_args()
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        folder = args.work / f"seed{seed}"
        if not (folder / DATASET).is_dir():
            make_dataset(folder / DATASET, seed)
        for method in METHODS:
            trained = train_and_score(folder, method, seed, args.seconds, console)
            environment = read_json(trained.run / ENVIRONMENT)
            rows.append({"seed": seed, "method": method, **trained.to_json(), "environment": environment})
            args.out.mkdir(parents=True, exist_ok=True)
            trained.summary.write_csv(args.out / f"seed{seed}_{method}.csv")
            write_json(args.out / "phantom.json", {"recipe": RECIPE, "seconds": args.seconds, "runs": rows})
    with atomic_path(args.out / "phantom.md") as temporary:
        temporary.write_text(_table(rows), encoding="utf-8")


def _table(rows: list[dict[str, Any]]) -> str:
    """Mean over seeds, and the range of the seeds' means, in Markdown."""
    names = list(rows[0]["classes"])
    lines = [
        f"| method | {' | '.join(f'{name} Dice' for name in names)} | mean Dice (range over seeds) | mean HD95, mm |",
        "|---" * (len(names) + 3) + "|",
    ]
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        per_class = [f"{100 * statistics.mean(row['classes'][name]['Dice'] for row in own):.1f}" for name in names]
        dice = [100 * row["Dice"] for row in own]
        spread = f"{statistics.mean(dice):.1f} ({min(dice):.1f} to {max(dice):.1f})"
        distances = [row["HD95"] for row in own if row["HD95"] is not None]
        distance = f"{statistics.mean(distances):.1f}" if distances else "–"
        lines.append(f"| {method} | {' | '.join(per_class)} | {spread} | {distance} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
