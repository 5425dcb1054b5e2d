"""A MONAI bundle that MONAI itself runs, with the labels of the model it came from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from pclmix.cli import app
from pclmix.errors import PclmixError
from pclmix.export.bundle import PURPOSE
from pclmix.inference import load
from pclmix.io.volume import read_labels


@pytest.fixture(scope="module")
def bundle(lively_model: Path, phantom_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "heart"
    arguments = ["export", str(lively_model), str(out), "--format", "bundle", "--images", str(phantom_dataset)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return out


def test_monai_runs_it(bundle: Path, lively_model: Path, phantom_dataset: Path, tmp_path: Path) -> None:
    image = phantom_dataset / "imagesTr" / "phantom001_frame01_0000.nii.gz"
    command = [sys.executable, "-m", "monai.bundle", "run", "--config_file", bundle / "configs" / "inference.json"]
    command += ["--bundle_root", bundle, "--dataset_dir", image, "--output_dir", tmp_path / "out"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = load(lively_model, device="cpu").predict_file(image, tmp_path / "own.nii.gz")
    np.testing.assert_array_equal(read_labels(tmp_path / "out" / "phantom001_frame01.nii.gz")[0], expected)


@pytest.mark.parametrize(("format", "library"), [("bundle", "monai"), ("onnx", "onnxscript")])
def test_a_missing_library_is_named_before_the_export(
    lively_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    out = tmp_path / ("heart" if format == "bundle" else "heart.onnx")
    done = CliRunner().invoke(app, ["export", str(lively_model), str(out), "--format", format])
    assert isinstance(done.exception, PclmixError)
    assert library in str(done.exception)
    assert "pip install '.[export]'" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_bundle_metadata(bundle: Path) -> None:
    assert PURPOSE in (bundle / "docs" / "MODEL.md").read_text()
    metadata = json.loads((bundle / "configs" / "metadata.json").read_text())
    for key in ("version", "monai_version", "pytorch_version", "numpy_version", "task", "network_data_format"):
        assert metadata[key]
    formats = metadata["network_data_format"]
    assert formats["inputs"]["image"]["num_channels"] == 1
    assert formats["outputs"]["pred"]["channel_def"] == {"0": "background", "1": "RV", "2": "Myo", "3": "LV"}
    figures = json.loads((bundle / "comparison.json").read_text())
    assert figures["argmax_agreement"] == 1.0
    assert "RV, Myo, LV" in (bundle / "docs" / "README.md").read_text()


def test_invalid_exports_are_refused(bundle: Path, lively_model: Path, tmp_path: Path) -> None:
    for words, *arguments in (
        (str(bundle), str(bundle)),
        ("a.onnx", str(tmp_path / "a.onnx")),
        ("--precision int8", str(tmp_path / "a"), "--precision", "int8"),
    ):
        done = CliRunner().invoke(app, ["export", str(lively_model), *arguments, "--format", "bundle"])
        assert isinstance(done.exception, PclmixError)
        assert words in str(done.exception)
