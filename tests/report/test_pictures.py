"""A comparison on colour photographs: in colour, without a slice number, in px."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pclmix.data.dataset import write_dataset_json
from pclmix.labels import Labels
from pclmix.report import qualitative
from pclmix.report.pages import compare
from pclmix.report.tables import read_runs
from pclmix.report.training import PICTURES, draw_run
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training

LABELS = Labels(("background", "disc"), 2)


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """A dataset of two RGB pictures of a red disc on green, and predictions that are a little small."""
    y, x = np.mgrid[:60, :80]
    for case, radius in (("a", 15), ("b", 18)):
        disc = np.hypot(y - 30, x - 40) < radius
        strokes = np.where(disc & (y == 30), 1, np.where(y == 5, 0, 2))
        files = {
            f"data/imagesTr/{case}_0000": np.where(disc[..., None], (200, 20, 20), (20, 150, 20)),
            f"data/labelsTr/{case}": strokes,
            f"data/referenceTr/{case}": disc,
            f"run/predictions/{case}": np.hypot(y - 30, x - 40) < radius - 2,
        }
        for name, array in files.items():
            path = tmp_path / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array.astype(np.uint8)).save(path)
    channels = ["R", "G", "B"]
    write_dataset_json(tmp_path / "data", channels=channels, labels=LABELS, ending=".png", cases=2)
    return tmp_path


def test_photographs(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    drawn = qualitative._cell
    monkeypatch.setattr(qualitative, "_cell", lambda picture, *rest: shown.append(picture) or drawn(picture, *rest))
    runs = read_runs([f"ours={photographs / 'run/predictions'}"], photographs / "data")
    compare(runs, photographs / "out", dataset=photographs / "data")
    texts = re.findall(r"<text[^>]*>([^<]*)", (photographs / "out" / "qualitative.svg").read_text())
    assert "image" in texts
    assert not any("slice" in text for text in texts)
    middle = shown[0][shown[0].shape[0] // 2, shown[0].shape[1] // 2]
    assert middle == pytest.approx(np.array((200, 20, 20)) / 255, abs=0.02)
    assert "px" in (photographs / "out" / "table.md").read_text()


def test_examples_of_a_run_are_in_colour(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCLMIX_CACHE", str(photographs / "cache"))
    run = photographs / "trained"
    settings = ("engine.iterations=1", "data.size=[32,32]", "data.intensity=window", "data.window=[0,255]")
    request = TrainRequest(photographs / "data", run, recipe="tiny", method="pce", overrides=settings, device="cpu")
    assert run_training(request)
    draw_run(run)
    drawn = np.asarray(Image.open(run / PICTURES).convert("RGB")).reshape(-1, 3).astype(int)
    for colour in ((200, 20, 20), (20, 150, 20)):
        assert (np.abs(drawn - colour).max(axis=1) <= 12).sum() > 1000
