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
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

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
def test_golden_predictions(kind: str, expected: dict[str, np.ndarray], tmp_path: Path) -> None:
    model = golden.checkpoint_file(tmp_path) if kind == "torch" else golden.EXPORT
    require_golden(kind, golden.predictions(model), expected)


def require_golden(kind: str, found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for key in ("labels", "flip"):
        assert (found[key] != expected[f"{kind}_{key}"]).mean() <= DIFFERENT, key
    apart = np.abs(found["entropy"].astype(int) - expected[f"{kind}_entropy"])
    assert (apart > 2).mean() <= DIFFERENT
    np.testing.assert_allclose(found["figures"], expected[f"{kind}_figures"], rtol=1e-3)


def as_tf32(x: Tensor | None) -> Tensor | None:
    """With a mantissa of 10 bits, as GPUs round where torch allows it."""
    return None if x is None else (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("change", ["TF32", "weights", "resize"])
def test_small_changes_are_noticed(
    change: str, expected: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an upgrade could do: convolutions in TF32 (torch), other weights after loading or another resize (ONNX)."""
    kind, model = "onnx", tmp_path / "changed.onnx"
    if change == "TF32":
        kind, model, plain = "torch", golden.checkpoint_file(tmp_path), nn.Conv2d._conv_forward
        rounded = lambda conv, x, w, b: plain(conv, as_tf32(x), as_tf32(w), b)  # noqa: E731
        monkeypatch.setattr(nn.Conv2d, "_conv_forward", rounded)
    else:
        content, rng = onnx.load(str(golden.EXPORT)), np.random.default_rng(0)
        for tensor in content.graph.initializer:
            array = numpy_helper.to_array(tensor)
            if change == "weights" and array.ndim == 4:
                noise = 1 + 0.003 * rng.standard_normal(array.shape)
                tensor.CopyFrom(numpy_helper.from_array((array * noise).astype(array.dtype), tensor.name))
        modes = [a for node in content.graph.node if node.op_type == "Resize" for a in node.attribute]
        for attribute in modes:
            if change == "resize" and attribute.name == "coordinate_transformation_mode":
                attribute.s = b"align_corners"
        onnx.save(content, str(model))
    with pytest.raises(AssertionError):
        require_golden(kind, golden.predictions(model), expected)


def test_the_runtime_predicts_the_same(expected: dict[str, np.ndarray], tmp_path: Path) -> None:
    """The modules of its build, in a process that has neither pclmix nor torch."""
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


def test_golden_labels_contain_every_class(expected: dict[str, np.ndarray]) -> None:
    """All classes are there, mostly in the right place, and every way to predict agrees."""
    reference, labels = expected["reference"], expected["torch_labels"]
    for k in (1, 2, 3):
        assert metrics.dice(labels == k, reference == k) > 0.6
    assert (labels != expected["onnx_labels"]).mean() <= DIFFERENT
    assert (labels != expected["torch_flip"]).mean() > 0.001, "flips change something"
    assert (expected["torch_entropy"] != expected["onnx_entropy"]).mean() > 0.01, "two decoders know more than one"
    files = (golden.WEIGHTS, golden.EXPORT, golden.IMAGE, golden.EXPECTED)
    assert sum(path.stat().st_size for path in files) < BYTES
