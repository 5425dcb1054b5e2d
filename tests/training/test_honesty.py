"""Training reads only the scribbles of its training patients."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pclmix.config import load_config
from pclmix.data.dataset import Dataset, patient_of
from pclmix.training.checkpoint import LAST, load_checkpoint
from pclmix.training.parallel import Process
from pclmix.training.plan import Plan
from pclmix.training.prepare import prepare
from pclmix.training.request import TrainRequest

TWO = ("engine.iterations=2",)


@pytest.fixture
def blind(phantom: Path, tmp_path: Path) -> Path:
    """The phantom without dense masks, and with the test cases of fold 1 made unreadable."""
    root = tmp_path / "blind"
    shutil.copytree(phantom, root)
    shutil.rmtree(root / "referenceTr")
    dataset = Dataset.open(root)
    for case in dataset.fold(1).test:
        dataset.image_paths(case)[0].write_bytes(b"poison")
        dataset.scribble_path(case).unlink()
    return root


@pytest.mark.parametrize("validation", ["0", "0.5"])
def test_the_test_fold_and_dense_masks_change_nothing(
    phantom: Path, blind: Path, tmp_path: Path, validation: str, train: Callable[..., Any], monkeypatch: Any
) -> None:
    contents = []
    for number, dataset in enumerate((phantom, blind)):
        # Each with its own cache, so that neither can use slices prepared by the other.
        monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / f"cache{number}"))
        run = tmp_path / f"run{number}"
        assert train(dataset, run, *TWO, f"data.validation={validation}", fold=1, method="pce")[0]
        contents.append((load_checkpoint(run / LAST), (run / "metrics.jsonl").read_bytes()))
    (one, log), (two, other_log) = contents
    assert log == other_log
    assert all((one.method[name] == two.method[name]).all() for name in one.method)
    assert one.run.cases == two.run.cases
    assert not set(one.run.cases) & set(Dataset.open(phantom).fold(1).test)
    assert ("validation/recall" in json.loads(log.splitlines()[-1])) == (validation != "0")


@pytest.mark.parametrize("fold", [None, 1, 2, 3])
def test_validation_is_cut_off_training_patients(phantom: Path, fold: int | None) -> None:
    dataset = Dataset.open(phantom)
    allowed = set(dataset.cases if fold is None else dataset.fold(fold).train)
    config = load_config("tiny", "pce", ["data.validation=0.4"])
    plan = Plan(TrainRequest(phantom, Path("run")), config, dataset, fold, None)
    prepared = prepare(plan, Process(torch.device("cpu")), Console(quiet=True))
    assert prepared.validation is not None
    trained, held = set(prepared.train.cases), set(prepared.validation.cases)
    assert trained | held == allowed
    assert not {patient_of(case) for case in trained} & {patient_of(case) for case in held}
    assert held
