"""Quoted figures: pages agree with the files under results/, and means with their per-case values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pclmix.io.files import read_json
from pclmix.metrics import read_summary

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "results.py"
RUNS = sorted((ROOT / "results" / "acdc").glob("**/summary.json"))


def test_pages_equal_the_files() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.parent.relative_to(ROOT / "results" / "acdc")))
def test_means_equal_their_cases(path: Path) -> None:
    for column, content in read_json(path)["columns"].items():
        for measure in ("Dice", "HD95_50"):
            mean = read_summary(path.with_name(f"{column}.csv")).mean(measure).mean
            assert mean == pytest.approx(content["mean"][measure], rel=1e-4), f"{column} {measure}"
