"""Every benchmark starts: its imports exist and --help works."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

from pclmix.data.dataset import Dataset
from pclmix.synth.phantom import make_phantom
from pclmix.web.strokes import StrokeStore
from pclmix.web.workspace import Workspace

FOLDER = Path(__file__).parents[1] / "benchmarks"


def imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_help(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    module = imported(path, monkeypatch)
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code == 0
    assert "usage" in capsys.readouterr().out


def test_kills_finds_what_differs(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One label, one weight, one line of a log, one file too few."""
    kills = imported(FOLDER / "kills.py", monkeypatch)
    one, other = tmp_path / "one", tmp_path / "other"
    shutil.copytree(tiny_run, one)
    labels = np.zeros((4, 4, 4), np.uint8)
    nib.save(nib.Nifti1Image(labels, np.eye(4)), one / "a.nii.gz")
    shutil.copytree(one, other)
    assert kills.differences(one, other) == []
    labels[1, 2, 3] = 1
    nib.save(nib.Nifti1Image(labels, np.eye(4)), other / "a.nii.gz")
    content = torch.load(other / "last.ckpt", weights_only=True)
    next(iter(content["method"].values())).view(-1)[0] += 1e-6
    torch.save(content, other / "last.ckpt")
    with (other / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    (other / "config.yaml").unlink()
    found = kills.differences(one, other)
    assert sorted(name.split(" ")[0] for name in found) == ["a.nii.gz", "config.yaml", "last.ckpt", "metrics.jsonl"]


def test_soak_of_a_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soak = imported(FOLDER / "soak.py", monkeypatch)
    found = soak.soak(6, tmp_path / "work", training=False, size=0)
    assert found["findings"] == []
    assert found["acknowledged_saves"] > 3
    assert found["acknowledged_saves"] <= found["found_in_file_or_history"]
    assert found["lost"] == 0
    assert found["server_kills"] > 0


def test_soak_finds_a_lost_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three saves: the newest is lost, one in the history is lost, one is followed by another program's write."""
    imported(FOLDER / "soak.py", monkeypatch)
    ledgers = importlib.import_module("soaking.ledger")
    root = tmp_path / "data"
    make_phantom(root, 1)
    store = StrokeStore(Workspace(root))
    case = store.workspace.dataset.cases[0]

    def saved() -> Any:
        shutil.rmtree(store.workspace.internal("history"), ignore_errors=True)
        record = ledgers.Record()
        ledger = ledgers.Ledger(Dataset.open(root), case, record)
        for k in range(3):
            before = store.read(case)
            after = before.array.copy()
            after[0, k, :5] = 1 + (after[0, k, 0] == 1)
            at = k * after.shape[2]
            number = ledger.send(before.version, after)
            ledger.acknowledged(number, store.save(case, before.version, [(at, 5, int(after[0, k, 0]))]))
        return ledger

    ledger = saved()
    ledger.audit()
    assert ledger.record.findings == []
    for harm in ("newest", "history", "stranger"):
        ledger = saved()
        newest = max(ledger.folder.iterdir())
        if harm == "newest":
            shutil.copy(newest, ledger.path)
        elif harm == "history":
            newest.unlink()
        else:
            ledger.seen("other", store.read(case).array + 1)
        ledger.audit()
        assert ledger.record.findings, harm
