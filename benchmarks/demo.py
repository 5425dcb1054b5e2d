"""The demo over several seeds: by how much PCLMix is ahead of partial cross-entropy, and how long it all takes.

    python benchmarks/demo.py results/demo --work /tmp/demo

Each seed draws another phantom and other weights. The recipe was tuned on the seeds 0 and 1, and 2 was looked at; 3 and
4 were not. OUT gets demo.json (both scores, the difference, steps and seconds of each seed) and one CSV of per-case
values for each seed and method. The bars: at least 5 Dice points on each seed, and under 240 seconds in all on two
cores that do nothing else; the exit code says whether they were met.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from rich.console import Console

from pclmix.io.files import write_json
from pclmix.studies.demo import SECONDS, run_demo

POINTS, LIMIT = 5.0, 240.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="datasets and runs go here")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--seconds", type=float, default=SECONDS)
    args = parser.parse_args()
    console = Console(stderr=True)
    rows = []
    for seed in args.seeds:
        demo = run_demo(args.work / f"seed{seed}", seed=seed, seconds=args.seconds, overwrite=True, console=console)
        rows.append(demo.to_json())
        args.out.mkdir(parents=True, exist_ok=True)
        for one in demo.trained:
            shutil.copyfile(one.run / "cases.csv", args.out / f"seed{seed}_{one.method}.csv")
        ahead = [row["dice_points_ahead"] for row in rows]
        slowest = max(row["total_seconds"] for row in rows)
        content = {"least_points_ahead": min(ahead), "mean_points_ahead": sum(ahead) / len(ahead)}
        write_json(args.out / "demo.json", {**content, "slowest_seconds": slowest, "seeds": rows})
        console.print(f"seed {seed}: {demo.points:+.1f} Dice points, {demo.seconds:.0f} s in all", highlight=False)
    if min(ahead) < POINTS or slowest > LIMIT:
        sys.exit(f"missed: {min(ahead):+.1f} points (bar {POINTS:+.1f}), {slowest:.0f} s (bar {LIMIT:.0f} s)")


if __name__ == "__main__":
    main()
