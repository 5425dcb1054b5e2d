"""What cannot be scored is refused, and said why."""

import numpy as np
import pytest
from made import SHAPE, run, save, truth

from pclmix.errors import PclmixError
from pclmix.evaluate import evaluate


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros((4, 24, 21), np.uint8), "shapes differ"),
        (np.full(SHAPE, 900, np.uint16), "is it an image"),
    ],
)
def test_bad_predictions_are_refused(masks, array, text):
    pred, ref = masks
    save(pred, "p2_ED", array)
    with pytest.raises(PclmixError, match=text):
        evaluate(pred, ref)


def grey(high=200):
    """A noisy integer image over the grid of the masks."""
    return np.random.default_rng(0).integers(0, high, SHAPE).astype(np.uint16)


@pytest.mark.parametrize("high", [200, 3000])
def test_an_image_is_not_scored_as_if_its_grey_values_were_classes(masks, dataset, high, monkeypatch, capsys):
    pred, ref = masks
    save(pred, "p2_ED", grey(high))
    file = pred / "p2_ED.nii.gz"
    for pair in ((pred, ref), (file, ref / "p2_ED.nii.gz"), (ref / "p2_ED.nii.gz", file)):
        assert run(monkeypatch, "evaluate", *pair) == 2
        message = capsys.readouterr().err
        assert str(file) in message
        assert "is no label map but an image, it seems" in message
        assert "give the label map" in message
    with pytest.raises(PclmixError, match=r"p2_ED.nii.gz: label values .* it looks like an image; give the label map"):
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


def test_a_small_number_that_never_occurs_keeps_its_place(tmp_path):
    save(tmp_path / "ref", "a", np.where(truth(0) == 2, 3, truth(0)))
    assert evaluate(tmp_path / "ref", tmp_path / "ref").names == ("1", "2", "3")
    save(tmp_path / "none", "a", truth(0) * 0)
    assert evaluate(tmp_path / "none", tmp_path / "none").names == ("1",)


def test_values_that_the_dataset_does_not_know_are_refused(masks, dataset):
    pred, _ = masks
    save(pred, "p2_ED", truth(2) * 3)
    with pytest.raises(PclmixError, match=r"6 are not in dataset.json"):
        evaluate(pred, dataset)


def test_a_run_that_has_not_predicted_is_told_so(masks, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.ckpt").write_bytes(b"")
    save(tmp_path / "run", "losses", truth(0))
    with pytest.raises(PclmixError, match=r"run is a run without predictions; first `pclmix predict .*run DATASET"):
        evaluate(tmp_path / "run", masks[1])


def test_nothing_there(tmp_path, masks):
    with pytest.raises(PclmixError, match="does not exist"):
        evaluate(tmp_path / "nowhere", masks[1])
    (tmp_path / "empty").mkdir()
    with pytest.raises(PclmixError, match="holds no label maps"):
        evaluate(tmp_path / "empty", masks[1])
    save(tmp_path / "strange", "zzz", truth(0))
    with pytest.raises(PclmixError, match="zzz"):
        evaluate(tmp_path / "strange", masks[1])
    save(tmp_path / "twice", "p1_ED", truth(0))
    (tmp_path / "twice" / "p1_ED.nii").write_bytes(b"x")
    with pytest.raises(PclmixError, match="keep one"):
        evaluate(tmp_path / "twice", masks[1])


def test_one_name_is_no_list_of_names(masks):
    with pytest.raises(PclmixError, match=r"cases='p1_ED': a list of names is needed, such as \['p1_ED'\]"):
        evaluate(*masks, cases="p1_ED")
