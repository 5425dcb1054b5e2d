"""Model cards, `pclmix info`, and the card in every export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import pytest
from typer.testing import CliRunner

from pclmix import __version__
from pclmix.cli import app
from pclmix.errors import PclmixError
from pclmix.export.bundle import PURPOSE, markdown, model_card
from pclmix.export.onnx import export_onnx
from pclmix.io.files import write_json
from pclmix.metrics import evaluate
from pclmix.training.checkpoint import load_checkpoint


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_run, tmp_path / "run")
    return tmp_path / "run"


def test_the_card_of_a_run(run: Path, phantom_dataset: Path) -> None:
    card, checkpoint = model_card(run), load_checkpoint(run / "last.ckpt")
    values = ["0 background", "1 RV", "2 Myo", "3 LV"]
    assert card["task"] == {
        "segments": ["RV", "Myo", "LV"],
        "channels": ["MRI"],
        "label values": values,
        "intended use": PURPOSE,
    }
    assert (card["data"]["dataset"], card["data"]["fold left out"]) == ("phantom", 1)
    assert card["data"]["training cases"] == len(checkpoint.run.cases) == 4
    training = card["training"]
    assert (training["method"], training["recipe"], training["steps"]) == ("pclmix", "tiny", 3)
    assert training["supervision"] == "scribbles"
    assert card["stroke habits"]["background"] == ["ring"]
    assert list(card["scores"]) == ["none"]
    assert card["versions"]["pclmix"] == __version__
    masks = phantom_dataset / "referenceTr"
    evaluate(masks, phantom_dataset, cases=["phantom001_frame01", "phantom002_frame01"]).write_json(
        run / "evaluation.json"
    )
    scores = model_card(run)["scores"]
    assert scores["Dice, mean (sd)"] == "1.000 (0.000)"
    assert (scores["cases"], scores["of them trained on"]) == (2, 1)
    assert scores["Dice by class"] == {"RV": "1.000", "Myo": "1.000", "LV": "1.000"}


def test_damaged_evaluation_gives_no_score(run: Path) -> None:
    write_json(run / "evaluation.json", {"mean": 3})
    assert list(model_card(run)["scores"]) == ["none"]


def test_every_export_carries_its_card(run: Path, tmp_path: Path) -> None:
    export_onnx(run, tmp_path / "heart.onnx")
    expected = model_card(run)
    said = {p.key: json.loads(p.value) for p in onnx.load(str(tmp_path / "heart.onnx")).metadata_props}
    assert said["pclmix.card"] == expected
    text = (tmp_path / "heart.md").read_text()
    figures = json.loads((tmp_path / "heart.json").read_text())
    export = {
        "precision": "fp32",
        "compared with the original on": f"{figures['slices']} slices of {len(figures['compared_on'])} images",
        "labels as the original": f"{100 * figures['argmax_agreement']:.3f} %",
        "change of Dice": f"{figures['dice_change_points']:+.2f} points",
    }
    assert text == markdown({**expected, "export": export}, "heart")
    assert PURPOSE in text
    exported = model_card(tmp_path / "heart.onnx")
    assert exported == {**expected, "export": {"precision": "fp32", "pclmix": __version__}}


def test_info_fits_a_screen(run: Path, phantom_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for target, words in ((run, ("RV", "tiny", "Not calibrated")), (phantom_dataset, ("phantom", "RV", "(Z, H, W)"))):
        done = CliRunner().invoke(app, ["info", str(target)])
        assert done.exit_code == 0, done.output
        assert len(done.output.splitlines()) <= 30
        text = " ".join(done.output.split())  # lines are wrapped
        assert all(word in text for word in words)
        said = json.loads(CliRunner().invoke(app, ["info", str(target), "--json"]).output)
        assert all(isinstance(rows, dict) for rows in said.values())


def test_info_refuses_other_paths(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_text("x")
    for target in (tmp_path, tmp_path / "none", tmp_path / "none.onnx", tmp_path / "bad.onnx"):
        done = CliRunner().invoke(app, ["info", str(target)])
        assert isinstance(done.exception, PclmixError)
        assert str(target) in str(done.exception)
