"""Torch, onnxruntime and pclmix-runtime predict what they predicted when the golden files were made.

An upgrade of torch or onnxruntime that changes results fails here. Processors round differently, so a few pixels on
borders may differ.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import golden
from pclmix import metrics
from pclmix.io.volume import read_labels

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "runtime"
DIFFERENT = 5e-4  # share of pixels that may have another label
BYTES = 1_000_000  # of all golden files


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    with np.load(golden.EXPECTED) as content:
        return dict(content)


@pytest.mark.parametrize("kind", ["torch", "onnx"])
def test_predictions_are_those_kept(kind: str, expected: dict[str, np.ndarray], tmp_path: Path) -> None:
    model = golden.checkpoint_file(tmp_path) if kind == "torch" else golden.EXPORT
    found = golden.predictions(model)
    for key in ("labels", "flip"):
        assert (found[key] != expected[f"{kind}_{key}"]).mean() <= DIFFERENT, key
    apart = np.abs(found["entropy"].astype(int) - expected[f"{kind}_entropy"])
    assert (apart > 2).mean() <= DIFFERENT
    np.testing.assert_allclose(found["figures"], expected[f"{kind}_figures"], rtol=1e-3)


def test_the_runtime_predicts_the_same(expected: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Its modules as its build takes them over, in a process that has neither pclmix nor torch."""
    package = tmp_path / "pclmix_runtime"
    tree = ast.parse((RUNTIME / "hatch_build.py").read_text(encoding="utf-8"))
    wanted = [n for n in tree.body if isinstance(n, ast.Assign | ast.FunctionDef)]
    names: dict[str, object] = {"re": re}
    exec(compile(ast.Module(wanted, []), "hatch_build.py", "exec"), names)
    sources = {path.name: path for path in (RUNTIME / "src" / "pclmix_runtime").glob("*.py")}
    sources |= {name: ROOT / "src" / "pclmix" / name for name in names["SHARED"]}  # type: ignore[attr-defined]
    for name, path in sources.items():
        target = package / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(names["renamed"](path.read_text(encoding="utf-8")), encoding="utf-8")  # type: ignore[operator]
    code = (
        "import sys; sys.modules['torch'] = sys.modules['pclmix'] = None;"
        "from pclmix_runtime.command import main; main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code, golden.EXPORT, golden.IMAGE, tmp_path / "out", "--uncertainty"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    labels = read_labels(tmp_path / "out" / "case.nii.gz")[0]
    assert (labels != expected["onnx_labels"]).mean() <= DIFFERENT
    row = (tmp_path / "out" / "quality.csv").read_text().splitlines()[1].split(",")
    assert float(row[1]) == pytest.approx(expected["onnx_figures"][0], rel=1e-3)


def test_golden_labels_are_worth_keeping(expected: dict[str, np.ndarray]) -> None:
    """All classes are there, mostly in the right place, and every way to predict agrees."""
    reference, labels = expected["reference"], expected["torch_labels"]
    for k in (1, 2, 3):
        assert metrics.dice(labels == k, reference == k) > 0.6
    assert (labels != expected["onnx_labels"]).mean() <= DIFFERENT
    assert (labels != expected["torch_flip"]).mean() > 0.001, "flips change something"
    assert (expected["torch_entropy"] != expected["onnx_entropy"]).mean() > 0.01, "two decoders know more than one"
    files = (golden.WEIGHTS, golden.EXPORT, golden.IMAGE, golden.EXPECTED)
    assert sum(path.stat().st_size for path in files) < BYTES
