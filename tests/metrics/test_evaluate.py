"""Scores of folders: values, policies for empty masks, tables and intervals."""

import csv
import json
import math

import nibabel as nib
import numpy as np
import pytest
from made import CASES, LABELS, SHAPE, SPACING, run, save, truth

from pclmix.data.dataset import write_dataset_json
from pclmix.errors import PclmixError
from pclmix.labels import Labels
from pclmix.metrics import evaluate, functional, read_summary


def test_values_are_those_of_the_metrics(masks):
    pred, ref = masks
    summary = evaluate(pred, ref)
    assert summary.names == ("1", "2")
    assert [entry.case for entry in summary.cases] == sorted(CASES)
    a, b = np.roll(truth(0), 1, axis=2) == 2, truth(0) == 2
    scores = summary.cases[0].classes["2"]
    assert scores.dice == pytest.approx(functional.dice(a, b))
    assert scores.hd95 == pytest.approx(functional.hd95(a, b, SPACING))
    assert scores.reference_ml == pytest.approx(b.sum() * 8 * 1.5 * 1.25 / 1000)


def test_json_and_csv_round_trip(masks, tmp_path, monkeypatch, capsys):
    pred, ref = masks
    out, table = tmp_path / "s.json", tmp_path / "s.csv"
    assert run(monkeypatch, "evaluate", pred, ref, "--out", out, "--csv", table) == 0
    content = json.loads(out.read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    summary = evaluate(pred, ref)
    dice = summary.values("Dice")
    assert content["mean"]["Dice"] == pytest.approx(dice.mean())
    assert content["classes"]["1"]["Dice"]["mean"] == pytest.approx(dice[:, 0].mean())
    assert content["classes"]["1"]["Dice"]["sd"] == pytest.approx(dice[:, 0].std())
    assert 0 < content["mean"]["Dice"] < 1 < content["mean"]["HD95"]
    assert len(content["cases"]) == 4
    assert len(list(csv.DictReader(table.open()))) == 8
    for path in (out, table):
        assert read_summary(path).values("HD95") == pytest.approx(summary.values("HD95"), rel=1e-5)
    before = out.read_bytes()
    assert run(monkeypatch, "evaluate", pred, ref, "--out", out) == 2
    assert str(out) in capsys.readouterr().err
    assert out.read_bytes() == before


def test_empty_masks(masks):
    pred, ref = masks
    no_two = np.where(truth(0) == 2, 0, truth(0))
    save(pred, "p1_ED", no_two)  # empty prediction of a present class
    save(ref, "p1_ES", np.where(truth(1) == 2, 0, truth(1)))  # predicted where absent
    save(pred, "p2_ED", np.where(truth(2) == 2, 0, truth(2)))  # absent from both
    save(ref, "p2_ED", np.where(truth(2) == 2, 0, truth(2)))
    summary = evaluate(pred, ref)
    assert list(summary.statuses("2").values()) == [1, 1, 1, 1]
    dice, hd, hd50 = (summary.values(m)[:, 1] for m in ("Dice", "HD95", "HD95_50"))
    assert dice[:3] == pytest.approx([0, 0, math.nan], nan_ok=True)
    assert np.isnan(hd[:3]).all()
    assert hd50[:3] == pytest.approx([50, math.nan, math.nan], nan_ok=True)
    content = summary.to_json()
    assert content["nan"] == {"Dice": 1, "HD95": 3, "HD95_50": 2, "ASSD": 3}
    assert content["classes"]["2"]["HD95"]["mean"] == pytest.approx(hd[3])
    assert content["mean"]["HD95"] == pytest.approx(np.nanmean(summary.values("HD95")))


def test_json_has_null_for_nan(masks):
    pred, ref = masks
    for case in CASES:
        save(pred, case, np.zeros(SHAPE, np.uint8))
    content = evaluate(pred, ref).to_json()
    assert content["mean"]["HD95"] is None
    assert content["mean"]["HD95_50"] == 50
    assert content["mean"]["Dice"] == 0


def test_dataset_gives_class_names_and_expected_cases(masks, dataset, monkeypatch, capsys, tmp_path):
    pred, _ = masks
    assert evaluate(pred, dataset).names == ("RV", "Myo")
    for case in CASES[2:]:
        (pred / f"{case}.nii.gz").unlink()
    summary = evaluate(pred, dataset)
    assert ([e.case for e in summary.cases], summary.missing) == (list(CASES[:2]), ())
    assert evaluate(pred, dataset / "referenceTr").missing == ()
    assert evaluate(pred, dataset / "referenceTr").names == ("1", "2")
    (pred / "p1_ES.nii.gz").unlink()
    out = tmp_path / "partial.json"
    assert run(monkeypatch, "evaluate", pred, dataset, "--out", out) == 2
    assert "p1_ES" in capsys.readouterr().err
    assert json.loads(out.read_text())["missing"] == ["p1_ES"]
    with pytest.raises(PclmixError, match=r"p1_ED.*p2_ED.*p3_ED"):
        evaluate(pred, dataset, fold=2)
    (dataset / "splits_final.json").unlink()
    assert evaluate(pred, dataset).missing == ()


def test_missing_predictions_and_extra_files_are_named(masks, monkeypatch, capsys):
    pred, ref = masks
    (pred / "p3_ED.nii.gz").unlink()
    save(pred, "other", truth(0))
    assert run(monkeypatch, "evaluate", pred, ref) == 2
    captured = capsys.readouterr()
    assert "p3_ED" in captured.err
    assert "other" in captured.out


def test_files_and_float_labels(masks, tmp_path):
    pred, ref = masks
    image = nib.load(pred / "p1_ED.nii.gz")
    floats = tmp_path / "renamed.nii.gz"
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj).astype(np.float32), image.affine, None), floats)
    whole = evaluate(pred, ref).cases[0]
    summary = evaluate(floats, ref / "p1_ED.nii.gz")
    assert summary.cases[0].classes == whole.classes
    assert evaluate(pred / "p1_ED.nii.gz", ref).cases == (whole,)


def test_spacing_comes_from_the_reference(masks, monkeypatch, capsys):
    pred, ref = masks
    save(pred, "p1_ED", truth(0), spacing=(1.0, 1.0, 1.0))
    assert run(monkeypatch, "evaluate", pred, ref) == 2
    message = capsys.readouterr().err
    assert str(pred / "p1_ED.nii.gz") in message
    assert str(ref / "p1_ED.nii.gz") in message
    summary = evaluate(pred, ref, ignore_headers=True)
    assert summary.cases[0].classes["1"].reference_ml == pytest.approx((truth(0) == 1).sum() * 15 / 1000)


def test_largest_component_removes_islands(masks):
    pred, ref = masks
    for i, case in enumerate(CASES):
        array = truth(i)
        array[0, 0, 0] = 1
        save(pred, case, array)
    plain, kept = evaluate(pred, ref), evaluate(pred, ref, largest_component=True)
    assert plain.mean("ASSD").mean > 0 == kept.mean("ASSD").mean
    assert kept.to_json()["largest_component"] is True


def test_voxels_without_annotation_are_left_out(dataset, masks):
    pred, _ = masks
    array = truth(0)
    array[:2] = 3
    save(dataset / "referenceTr", "p1_ED", array)
    upper, lower = np.roll(truth(0), 1, axis=2)[2:] == 1, truth(0)[2:] == 1
    assert evaluate(pred, dataset).cases[0].classes["RV"].dice == pytest.approx(functional.dice(upper, lower))


def test_against_gives_paired_intervals(masks, tmp_path, monkeypatch):
    pred, ref = masks
    better, out = tmp_path / "better", tmp_path / "b.json"
    for i, case in enumerate(CASES):
        save(better, case, truth(i))
    assert run(monkeypatch, "evaluate", better, ref, "--against", pred, "--out", out) == 0
    found = json.loads(out.read_text())["against"]
    a, b = evaluate(better, ref), evaluate(pred, ref)
    assert found["mean"]["Dice"]["difference"] == pytest.approx(a.mean("Dice").mean - b.mean("Dice").mean)
    assert found["patients"] == 3
    assert 0 < found["mean"]["Dice"]["low"] <= found["mean"]["Dice"]["difference"] <= found["mean"]["Dice"]["high"]
    assert found["classes"]["1"]["HD95"]["high"] < 0
    b.write_json(tmp_path / "other.json")
    assert (
        evaluate(better, ref, against=tmp_path / "other.json").against.mean
        == evaluate(better, ref, against=pred).against.mean
    )


def test_dataset_with_dense_labels_is_its_own_reference(tmp_path):
    for number, case in enumerate(CASES):
        save(tmp_path / "data/labelsTr", case, truth(number))
        save(tmp_path / "pred", case, truth(number))
    options = {"channels": ("MRI",), "ending": ".nii.gz", "cases": len(CASES)}
    write_dataset_json(tmp_path / "data", labels=Labels(LABELS.names, None), **options)
    (tmp_path / "data/imagesTr").mkdir()
    summary = evaluate(tmp_path / "pred", tmp_path / "data")
    assert summary.names == ("RV", "Myo")
    assert summary.mean("Dice").mean == 1.0
    assert len(evaluate(tmp_path / "pred", tmp_path / "data", fold=1).cases) == 2
    write_dataset_json(tmp_path / "data", labels=LABELS, **options)
    with pytest.raises(PclmixError, match="referenceTr"):
        evaluate(tmp_path / "pred", tmp_path / "data")
