"""Invalid predictions and references raise errors that name the file."""

import re

import numpy as np
import pytest
from made import SHAPE, run, save, truth

from pclmix.errors import PclmixError
from pclmix.metrics import evaluate

NAMES = r"p2_ED\.nii\.gz"


@pytest.mark.parametrize("array", [np.zeros((4, 24, 21), np.uint8), np.full(SHAPE, 900, np.uint16)])
def test_refuses_other_shapes_and_unknown_values(masks, array):
    pred, ref = masks
    save(pred, "p2_ED", array)
    with pytest.raises(PclmixError, match=NAMES):
        evaluate(pred, ref)


@pytest.mark.parametrize("high", [200, 3000])
def test_refuses_an_image_in_place_of_labels(masks, dataset, high, monkeypatch, capsys):
    pred, ref = masks
    save(pred, "p2_ED", np.random.default_rng(0).integers(0, high, SHAPE).astype(np.uint16))
    file = pred / "p2_ED.nii.gz"
    for pair in ((pred, ref), (file, ref / "p2_ED.nii.gz"), (ref / "p2_ED.nii.gz", file)):
        assert run(monkeypatch, "evaluate", *pair) == 2
        assert str(file) in capsys.readouterr().err
    with pytest.raises(PclmixError, match=NAMES):
        evaluate(pred, dataset)


def test_labels_may_be_large_or_many(tmp_path):
    for factor in (120, 300):  # such as 0, 128, 255 of a picture; 205, 420, ... of a set of hearts
        save(tmp_path / f"ref{factor}", "a", truth(0).astype(np.uint16) * factor)
        save(tmp_path / f"pred{factor}", "a", np.roll(truth(0), 1, axis=2).astype(np.uint16) * factor)
        summary = evaluate(tmp_path / f"pred{factor}", tmp_path / f"ref{factor}")
        assert summary.names == (str(factor), str(2 * factor))
        assert 0 < summary.mean("Dice").mean < 1
    blocks = np.kron(np.arange(1, 121).reshape(4, 6, 5), np.ones((1, 4, 4), int))
    save(tmp_path / "many", "a", blocks)
    summary = evaluate(tmp_path / "many", tmp_path / "many")
    assert len(summary.names) == 120
    assert summary.mean("Dice").mean == 1


def test_small_label_values_without_a_pixel_are_listed(tmp_path):
    save(tmp_path / "ref", "a", np.where(truth(0) == 2, 3, truth(0)))
    assert evaluate(tmp_path / "ref", tmp_path / "ref").names == ("1", "2", "3")
    save(tmp_path / "none", "a", truth(0) * 0)
    assert evaluate(tmp_path / "none", tmp_path / "none").names == ("1",)


def test_refuses_values_that_dataset_json_does_not_have(masks, dataset):
    pred, _ = masks
    save(pred, "p2_ED", truth(2) * 3)
    with pytest.raises(PclmixError, match=NAMES):
        evaluate(pred, dataset)


def test_refuses_a_run_without_predictions(masks, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.ckpt").write_bytes(b"")
    save(tmp_path / "run", "losses", truth(0))
    with pytest.raises(PclmixError, match=re.escape(str(tmp_path / "run"))):
        evaluate(tmp_path / "run", masks[1])


def test_refuses_missing_empty_and_ambiguous_folders(tmp_path, masks):
    (tmp_path / "empty").mkdir()
    save(tmp_path / "strange", "zzz", truth(0))
    save(tmp_path / "twice", "p1_ED", truth(0))
    (tmp_path / "twice" / "p1_ED.nii").write_bytes(b"x")
    for folder, named in (("nowhere", "nowhere"), ("empty", "empty"), ("strange", "zzz"), ("twice", r"p1_ED\.nii")):
        with pytest.raises(PclmixError, match=named):
            evaluate(tmp_path / folder, masks[1])


def test_refuses_one_name_as_list_of_cases(masks):
    with pytest.raises(PclmixError, match="cases"):
        evaluate(*masks, cases="p1_ED")
