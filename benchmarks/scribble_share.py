"""Share of pixels of simulated and of expert scribbles, by class.

    python benchmarks/scribble_share.py DATASET [--out results/scribbles] [--seed 0]

DATASET has scribbles in labelsTr and dense masks in referenceTr. Every case with both is drawn anew from its mask and
counted. The target is a share within a factor of two of the experts' for each class. Writes share.json and share.md.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pclmix.data.dataset import Dataset
from pclmix.io.files import atomic_path, write_json
from pclmix.synth.scribble import Style, case_rng, simulate


def measure(dataset: Dataset, seed: int) -> dict[str, object]:
    """Pixels of each class in the masks, in the experts' scribbles and in the simulated ones, over all cases."""
    classes = range(dataset.labels.count)
    masked, expert, simulated = np.zeros((3, len(classes)), np.int64)
    slices = pixels = cases = 0
    started = time.process_time()
    for case in dataset.cases:
        if not dataset.has_reference(case):
            continue
        mask, _ = dataset.read_reference(case)
        drawn, _ = dataset.read_scribble(case)
        made = simulate(mask, Style(), case_rng(seed, case))
        for total, array in ((masked, mask), (expert, drawn), (simulated, made)):
            total += [int((array == k).sum()) for k in classes]
        cases, slices, pixels = cases + 1, slices + len(mask), pixels + mask.size
    rows = [
        {
            "class": name,
            "pixels_in_masks": int(masked[k]),
            "expert_share_of_all_percent": round(100 * expert[k] / pixels, 4),
            "simulated_share_of_all_percent": round(100 * simulated[k] / pixels, 4),
            "expert_share_of_class_percent": round(100 * expert[k] / masked[k], 3),
            "simulated_share_of_class_percent": round(100 * simulated[k] / masked[k], 3),
            "simulated_over_expert": round(float(simulated[k] / expert[k]), 3),
        }
        for k, name in enumerate(dataset.labels.names)
    ]
    return {
        "dataset": dataset.name,
        "commit": _commit(),
        "cases": cases,
        "slices": slices,
        "seed": seed,
        "cpu_seconds": round(time.process_time() - started, 1),
        "within_a_factor_of_two": bool((simulated <= 2 * expert).all() and (expert <= 2 * simulated).all()),
        "classes": rows,
    }


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    here = Path(__file__).parent
    return subprocess.run(command, capture_output=True, text=True, cwd=here, check=False).stdout.strip() or "unknown"


def table(result: dict[str, object], rows: Sequence[dict[str, object]]) -> str:
    lines = [
        "# Scribbles: drawn by experts and simulated",
        "",
        f"Dataset {result['dataset']}: {result['cases']} volumes with scribbles and dense masks, {result['slices']} "
        f"slices; seed {result['seed']}; commit {result['commit']}; written by `benchmarks/scribble_share.py`.",
        "",
        "| class | expert, % of all pixels | simulated | expert, % of the class | simulated | simulated / expert |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        name, _, *values, ratio = row.values()
        lines.append(f"| {name} | {' | '.join(f'{v:.3g}' for v in values)} | {ratio:.2f} |")
    verdict = "yes" if result["within_a_factor_of_two"] else "no"
    return "\n".join([*lines, "", f"Each class within a factor of two: {verdict}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/scribbles"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = measure(Dataset.open(options.dataset), options.seed)
    text = table(result, result["classes"])  # type: ignore[arg-type]
    write_json(options.out / "share.json", result)
    with atomic_path(options.out / "share.md") as path:
        path.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
