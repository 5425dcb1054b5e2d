"""Figures in the documentation are the ones that runs wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_of_results_is_what_the_files_say() -> None:
    script = ROOT / "benchmarks" / "results.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
