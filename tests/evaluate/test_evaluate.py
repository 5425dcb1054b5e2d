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
from pclmix.evaluate import evaluate, metrics, read_summary
from pclmix.evaluate.bootstrap import paired_bootstrap
from pclmix.labels import Labels


def test_values_are_those_of_the_metrics(masks):
    pred, ref = masks
    summary = evaluate(pred, ref)
    assert summary.names == ("1", "2")
    assert [entry.case for entry in summary.cases] == sorted(CASES)
    a, b = np.roll(truth(0), 1, axis=2) == 2, truth(0) == 2
    scores = summary.cases[0].classes["2"]
    assert scores.dice == pytest.approx(metrics.dice(a, b))
    assert scores.hd95 == pytest.approx(metrics.hd95(a, b, SPACING))
    assert scores.reference_ml == pytest.approx(b.sum() * 8 * 1.5 * 1.25 / 1000)


def test_json_and_csv_hold_what_was_found_and_come_back(masks, tmp_path, monkeypatch, capsys):
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
    assert "4 cases" in capsys.readouterr().out
    assert run(monkeypatch, "evaluate", pred, ref, "--out", out) == 2
    assert "exists already" in capsys.readouterr().err


def test_both_policies_for_empty_masks_are_counted(masks):
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


def test_a_class_never_predicted_has_null_not_nan_in_json(masks):
    pred, ref = masks
    for case in CASES:
        save(pred, case, np.zeros(SHAPE, np.uint8))
    content = evaluate(pred, ref).to_json()
    assert content["mean"]["HD95"] is None
    assert content["mean"]["HD95_50"] == 50
    assert content["mean"]["Dice"] == 0


def test_a_dataset_names_the_classes_and_its_folds_say_what_is_expected(masks, dataset, monkeypatch, capsys, tmp_path):
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
    with pytest.raises(PclmixError, match=r"name of a case that was asked for in .*: p1_ED and p2_ED, p3_ED;"):
        evaluate(pred, dataset, fold=2)
    (dataset / "splits_final.json").unlink()
    assert evaluate(pred, dataset).missing == ()


def test_a_missing_prediction_is_named(masks, monkeypatch, capsys):
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


def test_millimetres_come_from_the_reference(masks, monkeypatch, capsys):
    pred, ref = masks
    save(pred, "p1_ED", truth(0), spacing=(1.0, 1.0, 1.0))
    assert run(monkeypatch, "evaluate", pred, ref) == 2
    message = capsys.readouterr().err
    assert "spacings differ" in message
    assert str(pred / "p1_ED.nii.gz") in message
    assert str(ref / "p1_ED.nii.gz") in message
    summary = evaluate(pred, ref, ignore_headers=True)
    assert summary.cases[0].classes["1"].reference_ml == pytest.approx((truth(0) == 1).sum() * 15 / 1000)


def test_the_largest_component_takes_islands_away(masks):
    pred, ref = masks
    for i, case in enumerate(CASES):
        array = truth(i)
        array[0, 0, 0] = 1
        save(pred, case, array)
    plain, kept = evaluate(pred, ref), evaluate(pred, ref, largest_component=True)
    assert plain.mean("ASSD").mean > 0 == kept.mean("ASSD").mean
    assert kept.to_json()["largest_component"] is True


def test_voxels_without_annotation_count_for_nobody(dataset, masks):
    pred, _ = masks
    array = truth(0)
    array[:2] = 3
    save(dataset / "referenceTr", "p1_ED", array)
    upper, lower = np.roll(truth(0), 1, axis=2)[2:] == 1, truth(0)[2:] == 1
    assert evaluate(pred, dataset).cases[0].classes["RV"].dice == pytest.approx(metrics.dice(upper, lower))


def test_against_gives_paired_intervals(masks, tmp_path, monkeypatch, capsys):
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
    assert "difference to" in capsys.readouterr().out
    b.write_json(tmp_path / "other.json")
    assert (
        evaluate(better, ref, against=tmp_path / "other.json").against.mean
        == evaluate(better, ref, against=pred).against.mean
    )


def test_the_bootstrap_draws_whole_patients():
    rng = np.random.default_rng(1)
    first, second = rng.normal(1, 1, 40), rng.normal(0, 1, 40)
    once = paired_bootstrap(first, second, [str(i) for i in range(40)])
    twice = paired_bootstrap(np.repeat(first, 2), np.repeat(second, 2), [str(i // 2) for i in range(80)])
    assert (once.low, once.high) == pytest.approx((twice.low, twice.high))
    assert once.difference == pytest.approx((first - second).mean())
    half_width = 1.96 * (first - second).std() / math.sqrt(40)
    assert once.high - once.low == pytest.approx(2 * half_width, rel=0.1)


def test_the_bootstrap_leaves_nan_pairs_out():
    first, second = np.array([1.0, math.nan, 3.0]), np.array([0.0, 1.0, math.nan])
    found = paired_bootstrap(first, second, ["a", "b", "c"])
    assert (found.n, found.left_out, found.difference) == (1, 2, 1)
    assert math.isnan(found.low)
    assert math.isnan(paired_bootstrap(second[2:], first[2:], ["a"]).difference)


def test_a_dataset_whose_labels_are_dense_is_its_own_reference(tmp_path):
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
    with pytest.raises(PclmixError, match=r"no dense masks to score with; put them into .*referenceTr"):
        evaluate(tmp_path / "pred", tmp_path / "data")
