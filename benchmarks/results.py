"""docs/results.md from results/: every figure in it is read from a file that a run wrote.

python benchmarks/results.py            # rewrites docs/results.md
python benchmarks/results.py --check    # fails where docs/results.md is not what results/ says
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pclmix.evaluate import read_summary
from pclmix.evaluate.summary import Summary

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
COLUMNS = {"raw": "raw", "tta": "flips", "component": "largest component", "tta_component": "flips, component"}


def cell(mean: dict[str, float]) -> str:
    return f"{100 * mean['Dice']:.1f} / {mean['HD95_50']:.1f}"


def runs_table(group: Path, about: dict[str, Any]) -> list[str]:
    """One row a run of a group: what it was, steps, minutes, and Dice / HD95 in each column."""
    heads = ["run", "fold", "steps", "minutes", *COLUMNS.values()]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name in about["order"]:
        content = json.loads((group / name / "summary.json").read_text())
        cells = [cell(content["columns"][column]["mean"]) for column in COLUMNS]
        row = [about["text"][name], content["fold"], content["steps"], f"{content['training_minutes']:.2f}", *cells]
        lines.append("| " + " | ".join(str(value) for value in row) + " |")
    return lines


def pooled_table(group: Path, about: dict[str, Any]) -> list[str]:
    """Cases of all folds of a frozen recipe together, per class."""
    lines: list[str] = []
    for column, title in COLUMNS.items():
        parts = [read_summary(group / name / f"{column}.csv") for name in about["order"]]
        names = parts[0].names
        pooled = Summary(names, tuple(case for part in parts for case in part.cases))
        if not lines:
            heads = ["column", "volumes", *names, "mean"]
            lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        pairs = [(pooled.of_class(n, "Dice").mean, pooled.of_class(n, "HD95_50").mean) for n in names]
        pairs.append((pooled.mean("Dice").mean, pooled.mean("HD95_50").mean))
        cells = [f"{100 * dice:.1f} / {distance:.1f}" for dice, distance in pairs]
        lines.append("| " + " | ".join([title, str(len(pooled.cases)), *cells]) + " |")
    return lines


def speed_table() -> list[str]:
    lines = []
    for path in sorted((ROOT / "results" / "step").glob("*.json")):
        r = json.loads(path.read_text())
        if not lines:
            lines = [
                "| | eager ms | graph ms | images/s | peak GiB | arithmetic floor ms | memory floor ms |",
                "|" + "---|" * 7,
            ]
        values = [r["eager_ms"], r["graph_ms"], r["images_per_second"], r["peak_memory_gib"]]
        values += [r["arithmetic_ms"], r["memory_ms"]]
        lines.append(f"| {path.stem[2:].replace('-', ' ')} | " + " | ".join(f"{v:.1f}" for v in values) + " |")
    return lines


def prediction_lines() -> list[str]:
    path = ROOT / "results" / "predict" / "h200.json"
    if not path.is_file():
        return []
    r = json.loads(path.read_text())
    return [
        "## Prediction",
        "",
        "One H200, whole volumes, from slices on the GPU to label maps at native size, files left out, ms a slice:",
        "",
        "| plain fp32, a slice at a time | fp32 | bf16 | bf16, captured | with flips |",
        "|" + "---|" * 5,
        "| "
        + " | ".join(f"{r[k]:.2f}" for k in ("plain_fp32_ms", "fp32_ms", "bf16_eager_ms", "bf16_graph_ms", "flip_ms"))
        + " |",
        "",
    ]


def page() -> str:
    lines = ["# Results", "", "Made by `python benchmarks/results.py` from the files under `results/`.", ""]
    lines += ["## ACDC", "", "Dice (%) / HD95 (mm, an empty prediction counted 50), mean over volumes and classes.", ""]
    for path in sorted((ROOT / "results" / "acdc").glob("*/about.json")):
        about = json.loads(path.read_text())
        lines += [f"### {about['title']}", "", *runs_table(path.parent, about), ""]
        if about.get("pooled"):
            lines += ["All folds together:", "", *pooled_table(path.parent, about), ""]
        lines += [about["note"], ""]
    speed = speed_table()
    if speed:
        lines += [
            "## The training step",
            "",
            "One H200, batch 12 (36 images of 256 x 256 a step), bf16.",
            "",
            *speed,
            "",
        ]
    return "\n".join([*lines, *prediction_lines()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = page()
    if args.check:
        sys.exit(
            0 if PAGE.is_file() and PAGE.read_text() == text else f"{PAGE} is not what results/ says; run {sys.argv[0]}"
        )
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
