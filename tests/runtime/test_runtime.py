"""pclmix-runtime in a separate venv: no torch, the same labels as pclmix."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from pclmix import __version__
from pclmix.export.onnx import export_onnx
from pclmix.inference import load
from pclmix.io.volume import read_labels

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "runtime"


def shared() -> tuple[str, ...]:
    """The modules that the build copies, read without importing hatchling."""
    tree = ast.parse((RUNTIME / "hatch_build.py").read_text())
    found = next(n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "SHARED")
    names: tuple[str, ...] = ast.literal_eval(found)
    return names


def test_one_version() -> None:
    project = tomllib.loads((RUNTIME / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__


def test_shared_modules_import_runtime_dependencies_only() -> None:
    """Every import at the top of a shared module is the standard library, NumPy, nibabel or another shared module."""
    known = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in shared()}
    for name in shared():
        for node in ast.parse((ROOT / "src" / "pclmix" / name).read_text()).body:
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for module in modules:
                top, _, rest = module.partition(".")
                if top == "pclmix":
                    assert not rest or rest in known, f"{name} imports {module}"
                else:
                    allowed = top in sys.stdlib_module_names or top in ("numpy", "nibabel")
                    assert allowed or name == "labels.py", f"{name} imports {module}"


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runtime") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    environment = {**os.environ, "PIP_DEFAULT_TIMEOUT": "20", "PIP_RETRIES": "1"}
    done = subprocess.run(
        [folder / "bin" / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", RUNTIME],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode and any(word in done.stderr for word in ("No matching distribution", "Connection", "timed out")):
        pytest.skip(f"no package index can be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_it_predicts_in_its_own_venv(venv: Path, lively_model: Path, phantom_dataset: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    export_onnx(lively_model, model, images=phantom_dataset)
    command = [venv / "bin" / "pclmix-predict", model, phantom_dataset, tmp_path / "out", "--fold", "1"]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean)
    assert done.returncode == 0, done.stderr
    assert "2 predicted" in done.stdout
    for case in ("phantom001_frame01", "phantom001_frame02"):
        expected = load(model).predict_file(
            phantom_dataset / "imagesTr" / f"{case}_0000.nii.gz", tmp_path / "own" / f"{case}.nii.gz"
        )
        given, geometry = read_labels(tmp_path / "out" / f"{case}.nii.gz")
        np.testing.assert_array_equal(given, expected)
        assert not geometry.same_grid(read_labels(tmp_path / "own" / f"{case}.nii.gz")[1])
    code = (
        "import importlib.util as u, pclmix_runtime as r, numpy as np, sys;"
        "assert not any(u.find_spec(n) for n in ('torch', 'monai', 'scipy', 'pclmix'));"
        "print(r.load(sys.argv[1]).predict(np.zeros((2, 40, 30)), (8, 1.5, 1.5)).shape)"
    )
    python = [venv / "bin" / "python", "-c", code, model]
    shown = subprocess.run(python, capture_output=True, text=True, cwd=tmp_path, env=clean, check=True).stdout
    assert shown.strip() == "(2, 40, 30)"
    text = tmp_path / "text.onnx"
    text.write_text("hello")
    for bad, words in ((text, "cannot be run by onnxruntime"), (lively_model, "not an .onnx file")):
        done = subprocess.run([*command[:1], bad, *command[2:]], capture_output=True, text=True, env=clean)
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr
