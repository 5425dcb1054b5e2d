"""Pictures: measured in their plane, in px without a spacing, and every output names the unit."""

import csv
import json
import math

import numpy as np
import pytest
from made import run, save
from PIL import Image

from pclmix.errors import PclmixError
from pclmix.metrics import evaluate, read_summary
from pclmix.report.pages import compare
from pclmix.report.tables import read_runs


def disc(path, radius, size=140):
    path.parent.mkdir(parents=True, exist_ok=True)
    y, x = np.mgrid[:size, :size] - size // 2
    Image.fromarray((np.hypot(y, x) <= radius).astype(np.uint8)).save(path)
    return path


@pytest.fixture
def pictures(tmp_path):
    """(predictions, references): two discs of radius 50 and 60 each."""
    for case in ("a", "b"):
        disc(tmp_path / "pred" / f"{case}.png", 50)
        disc(tmp_path / "ref" / f"{case}.png", 60)
    return tmp_path / "pred", tmp_path / "ref"


def test_pictures_without_spacing_are_scored_in_px(pictures):
    summary = evaluate(*pictures)
    assert summary.unit == "px"
    assert summary.mean("HD95").mean == pytest.approx(10, abs=0.1)
    assert summary.mean("ASSD").mean == pytest.approx(9.8, abs=0.1)
    assert math.isnan(summary.cases[0].classes["1"].volume_ml)
    assert repr(summary) == "Summary(2 cases, 1: Dice 82.0 %, HD95 10.0 px)"


def test_a_spacing_beside_the_reference_gives_mm(pictures):
    for case in ("a", "b"):
        (pictures[1] / f"{case}.json").write_text('{"spacing": [0.5, 0.5]}')
    summary = evaluate(*pictures)
    assert summary.unit == "mm"
    assert summary.mean("HD95").mean == pytest.approx(5, abs=0.05)
    (pictures[1] / "b.json").unlink()
    with pytest.raises(PclmixError, match=r"b\.png.*a\.png.*b\.json"):
        evaluate(*pictures)


def test_outputs_name_the_unit(pictures, tmp_path, monkeypatch, capsys):
    out, table = tmp_path / "s.json", tmp_path / "s.csv"
    assert run(monkeypatch, "evaluate", *pictures, "--out", out, "--csv", table) == 0
    shown = capsys.readouterr().out
    assert "HD95 px" in shown
    assert "mm" not in shown
    content = json.loads(out.read_text())
    assert content["unit"] == "px"
    assert content["classes"]["1"]["volume_ml"]["mean"] is None
    assert {row["unit"] for row in csv.DictReader(table.open())} == {"px"}
    assert read_summary(out).unit == read_summary(table).unit == "px"
    compare(read_runs([f"a={out}", f"b={table}"]), tmp_path / "cmp")
    for name in ("table.md", "report.html"):
        text = (tmp_path / "cmp" / name).read_text()
        assert "px" in text
        assert " mm" not in text
    assert json.loads((tmp_path / "cmp" / "compare.json").read_text())["unit"] == "px"


def test_files_without_a_unit_are_in_mm_and_units_do_not_mix(pictures, tmp_path):
    evaluate(*pictures).write_csv(tmp_path / "px.csv")
    rows = list(csv.DictReader((tmp_path / "px.csv").open()))
    with (tmp_path / "old.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [key for key in rows[0] if key != "unit"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    assert read_summary(tmp_path / "old.csv").unit == "mm"
    with pytest.raises(PclmixError, match=r"'old'.*'px'"):
        compare(read_runs([str(tmp_path / "old.csv"), str(tmp_path / "px.csv")]), tmp_path / "cmp")


def test_one_slice_volumes_are_measured_in_their_plane(tmp_path):
    for name, radius in (("pred", 50), ("ref", 60)):
        y, x = np.mgrid[:140, :140] - 70
        save(tmp_path / name, "a", (np.hypot(y, x) <= radius).astype(np.uint8)[None], spacing=(8.0, 0.5, 0.5))
    summary = evaluate(tmp_path / "pred", tmp_path / "ref")
    assert summary.unit == "mm"
    assert summary.mean("HD95").mean == pytest.approx(5, abs=0.05)
