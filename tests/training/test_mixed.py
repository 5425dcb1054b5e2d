"""Training on cases annotated in different ways: unlabelled, dense and scribbled ones together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from pclmix.data.dataset import Dataset
from pclmix.training.checkpoint import load_newest
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training


@pytest.fixture(scope="module")
def mixed(phantom_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first case has a dense mask in which the RV was not annotated, the second no stroke."""
    root = tmp_path_factory.mktemp("mixed") / "set"
    shutil.copytree(phantom_dataset, root)
    dataset = Dataset.open(root)
    dense, empty = dataset.cases[:2]
    ignore = dataset.labels.ignore
    mask = nib.load(dataset.reference_path(dense))
    labels = np.asarray(mask.dataobj).astype(np.int16)
    labels[labels == dataset.labels.names.index("RV")] = 0
    nib.save(nib.Nifti1Image(labels, mask.affine, mask.header), dataset.scribble_path(dense))
    strokes = nib.load(dataset.scribble_path(empty))
    nothing = np.full(strokes.shape, ignore, np.int16)
    nib.save(nib.Nifti1Image(nothing, strokes.affine, strokes.header), dataset.scribble_path(empty))
    content = json.loads((root / "dataset.json").read_text())
    content["not_annotated"] = {dense: ["RV"]}
    (root / "dataset.json").write_text(json.dumps(content))
    return root


@pytest.mark.parametrize("method", ["pclmix", "pce"])
def test_all_cases_take_part(mixed: Path, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "cache"))
    request = TrainRequest(
        mixed, tmp_path / "run", method=method, recipe="tiny", overrides=("engine.iterations=3",), device="cpu"
    )
    assert run_training(request)
    checkpoint = load_newest(tmp_path / "run")
    assert checkpoint is not None
    assert checkpoint.run.cases == Dataset.open(mixed).cases
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(np.isfinite(json.loads(line)["loss"]) for line in lines)
