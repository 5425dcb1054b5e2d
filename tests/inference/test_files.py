"""Files in, files out: names, channels, geometry, what is skipped and what is reported."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image

from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.inference.files import RECORD, SNAP, predict_files
from pclmix.inference.predictor import About
from pclmix.inference.torch import TorchPredictor
from pclmix.io.files import read_json, write_json
from pclmix.io.volume import read_image, read_labels
from pclmix.labels import Labels

LABELS = Labels(("background", "dark", "bright"), None)


class Threshold(torch.nn.Module):
    """Class 2 where the mean over channels is above one half, else 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mean(1, keepdim=True)
        return torch.cat([torch.full_like(x, -9.0), 0.5 - x, x - 0.5], dim=1)


def made(channels: int = 1, identity: str = "one") -> TorchPredictor:
    about = About("model", identity, LABELS, ("x",) * channels, (16, 16), "slice", "set", ("a_01",))
    return TorchPredictor(about, Threshold(), torch.device("cpu"), batch=2)


def write(path: Path, shape: tuple[int, int, int] = (12, 10, 3), seed: int = 0) -> Path:
    """A NIfTI whose axes are turned and whose affine is oblique, stored (X, Y, Z)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    affine = np.array([[0, -1.5, 0.3, 10], [-1.2, 0, 0, -20], [0, 0.2, -8.0, 30], [0, 0, 0, 1.0]])
    data = np.random.default_rng(seed).integers(0, 500, shape).astype(np.int16)
    nib.save(nib.Nifti1Image(data, affine), path)
    return path


def test_keeps_the_geometry_of_any_orientation(tmp_path: Path) -> None:
    source = write(tmp_path / "in" / "scan.nii.gz")
    outcome = predict_files(made(), source, tmp_path / "out")
    assert outcome.done == ["scan"]
    image, labels = nib.load(source), nib.load(tmp_path / "out" / "scan.nii.gz")
    np.testing.assert_array_equal(labels.affine, image.affine)
    for key in ("pixdim", "qform_code", "sform_code", "xyzt_units", "dim"):
        np.testing.assert_array_equal(labels.header[key], image.header[key])
    assert labels.get_data_dtype() == np.uint8
    assert bytes(labels.header["descrip"]).startswith(b"0=background 1=dark 2=bright")
    # The label of a voxel belongs to the intensity of that voxel: both are stored in one order.
    stored = np.asarray(image.dataobj).astype(float)
    scaled = (stored - stored.min((0, 1))) / np.ptp(stored, axis=(0, 1))
    assert np.corrcoef(scaled.ravel(), np.asarray(labels.dataobj).ravel())[0, 1] > 0.5


def test_keeps_a_pixdim_that_differs_from_the_affine(tmp_path: Path) -> None:
    """pixdim says 1.5625 x 1.5625 x 10 mm, the sform 1 mm, as in files of ACDC."""
    header = nib.Nifti1Header()
    header.set_data_dtype(np.int16)
    image = nib.Nifti1Image(np.arange(300, dtype=np.int16).reshape(10, 10, 3), None, header)
    image.header.set_zooms((1.5625, 1.5625, 10))
    image.header.set_sform(np.eye(4), code=2)
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.nii"
    path.write_bytes(image.to_bytes())
    predict_files(made(), tmp_path / "in", tmp_path / "out")
    written = nib.load(tmp_path / "out" / "a.nii.gz").header
    before = nib.load(path).header
    np.testing.assert_array_equal(written["pixdim"], before["pixdim"])
    np.testing.assert_array_equal(written.get_sform(), before.get_sform())


def test_channels_of_one_case(tmp_path: Path) -> None:
    for channel in (0, 1):
        write(tmp_path / "in" / f"a_01_{channel:04d}.nii.gz", seed=channel)
    outcome = predict_files(made(2), tmp_path / "in", tmp_path / "out")
    assert outcome.done == ["a_01"]
    alone = predict_files(made(2), tmp_path / "in" / "a_01_0000.nii.gz", tmp_path / "alone")
    assert alone.done == ["a_01"]
    paths = [tmp_path / folder / "a_01.nii.gz" for folder in ("out", "alone")]
    np.testing.assert_array_equal(*(read_labels(path)[0] for path in paths))
    too_many = predict_files(made(1), tmp_path / "in", tmp_path / "out1")
    assert re.search(r"\b2 channel.*\b1\b", too_many.bad["a_01"])
    too_few = predict_files(made(3), tmp_path / "in", tmp_path / "out3")
    assert re.search(r"\b2 channel.*\b3\b", too_few.bad["a_01"])


def test_a_list_of_files(tmp_path: Path) -> None:
    write(tmp_path / "one" / "a.nii.gz")
    for channel in (0, 1):
        write(tmp_path / "two" / f"b_{channel:04d}.nii.gz", seed=channel)
        write(tmp_path / "two" / f"c_{channel:04d}.nii.gz", seed=channel)
    given = tmp_path / "list.txt"
    lines = ["one/a.nii.gz", "", "one/lost.nii.gz", "one/a.nii.gz", "two/b_0000.nii.gz"]
    given.write_text("\n".join([*lines, *(str(tmp_path / "two" / f"c_{k:04d}.nii.gz") for k in (1, 0))]))
    outcome = predict_files(made(2), given, tmp_path / "out")
    assert outcome.done == ["b", "c"]  # a path starts at the list's folder; channel 0000 stands for the others
    assert sorted(outcome.bad) == ["a", "lost"]
    assert str(tmp_path / "one" / "lost.nii.gz") in outcome.bad["lost"]
    whole = predict_files(made(2), tmp_path / "two", tmp_path / "folder")
    assert whole.done == ["b", "c"]
    for case in ("b", "c"):
        paths = [tmp_path / folder / f"{case}.nii.gz" for folder in ("out", "folder")]
        np.testing.assert_array_equal(*(read_labels(path)[0] for path in paths))


@pytest.mark.parametrize(
    ("lines", "out", "named"),
    [
        (b"one/a.nii.gz\ntwo/a.nii.gz\n", "out", "two/a.nii.gz"),
        (b"one/a.nii.gz\n", "one", "one"),
        (b"\n \n", "out", "list.txt"),
        (b"\xff\xfe\x00", "out", "list.txt"),
        (b"one/a.nii.gz\n", "file.nii.gz", "file.nii.gz"),
    ],
)
def test_refuses_lists_with_one_message(tmp_path: Path, lines: bytes, out: str, named: str) -> None:
    for folder in ("one", "two"):
        write(tmp_path / folder / "a.nii.gz")
    (tmp_path / "file.nii.gz").write_bytes(b"")
    (tmp_path / "list.txt").write_bytes(lines)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PclmixError, match=re.escape(named)):
        predict_files(made(), tmp_path / "list.txt", tmp_path / out)
    assert sorted(tmp_path.rglob("*")) == before


def test_number_is_a_channel_if_0000_exists(tmp_path: Path) -> None:
    for name in ("scan_0001", "scan_0002", "other_0000"):
        write(tmp_path / "in" / f"{name}.nii.gz")
    outcome = predict_files(made(), tmp_path / "in", tmp_path / "out")
    assert sorted(outcome.done) == ["other", "scan_0001", "scan_0002"]


def test_reports_bad_files_and_predicts_the_others(tmp_path: Path) -> None:
    for k in range(9):
        write(tmp_path / "in" / f"case{k}.nii.gz", seed=k)
    whole = (tmp_path / "in" / "case4.nii.gz").read_bytes()
    (tmp_path / "in" / "case4.nii.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "in" / "case6.nii.gz").write_bytes(b"")
    nan = np.full((4, 4, 1), np.nan, np.float32)
    nib.save(nib.Nifti1Image(nan, np.eye(4)), tmp_path / "in" / "case7.nii.gz")
    seen: list[tuple[int, int]] = []
    outcome = predict_files(made(), tmp_path / "in", tmp_path / "out", progress=lambda *pair: seen.append(pair))
    assert sorted(outcome.bad) == ["case4", "case6", "case7"]
    assert len(outcome.done) == 6
    assert seen[-1] == (9, 9)
    with pytest.raises(PclmixError, match="3 of 9") as error:
        outcome.require_good()
    assert "case4.nii.gz" in str(error.value)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [f"case{k}.nii.gz" for k in (0, 1, 2, 3, 5, 8)] + [RECORD, SNAP]
    )
    # Repaired and called again, only what is missing is done.
    (tmp_path / "in" / "case4.nii.gz").write_bytes(whole)
    again = predict_files(made(), tmp_path / "in", tmp_path / "out")
    assert again.done == ["case4"]
    assert len(again.skipped) == 6


def test_bad_images_leave_no_files(tmp_path: Path) -> None:
    bad = tmp_path / "in" / "bad.nii.gz"
    bad.parent.mkdir()
    bad.write_bytes(b"no image")
    for uncertainty in (False, True):
        outcome = predict_files(made(), bad.parent, tmp_path / "new" / "out", uncertainty=uncertainty)
        assert list(outcome.bad) == ["bad"]
        assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").write_text("kept")
    stack = write(tmp_path / "in3" / "stack.nii.gz")
    job = made()
    job.write = lambda *_: (_ for _ in ()).throw(PclmixError("disk full"))  # type: ignore[method-assign, assignment]
    assert list(predict_files(job, stack.parent, tmp_path / "mine").bad) == ["stack"]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["note.txt"]


def test_resumes_when_killed_between_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """prediction.json and labels.txt are written together; unfinished files are no cases and removed after an hour."""
    source = write(tmp_path / "in" / "case.nii.gz").parent
    import pclmix.inference.files as module

    def killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as context:
        context.setattr(module, "write_json", killed)
        context.setattr(module._Record, "undo", lambda _: None)  # killed: no clean-up
        with pytest.raises(SystemExit):
            predict_files(made(), source, tmp_path / "out", uncertainty=True)
    assert not (tmp_path / "out" / RECORD).exists()
    left = [tmp_path / "out" / ".labels-a1b2c3d4.txt", tmp_path / "out" / "uncertainty" / ".case-a1b2c3d4.json"]
    left[1].parent.mkdir(exist_ok=True)
    for path in left:
        path.write_text('{"half')
        os.utime(path, (time.time() - 7200,) * 2)
    predict_files(made(), source, tmp_path / "out", uncertainty=True)
    assert (tmp_path / "out" / RECORD).is_file()
    assert (tmp_path / "out" / SNAP).is_file()
    assert not any(path.exists() for path in left)
    assert (tmp_path / "out" / "quality.csv").read_text().count("\n") == 2


def test_predicted_pictures_are_visible_and_read_back_equal(tmp_path: Path) -> None:
    root = picture_dataset(tmp_path / "set")
    predict_files(made(), root, tmp_path / "out")
    array = made().predict(root / "imagesTr" / "a_01_0000.png")
    with Image.open(tmp_path / "out" / "a_01.png") as picture:
        np.testing.assert_array_equal(np.asarray(picture), array)
        shown = np.asarray(picture.convert("RGB"))
    assert set(np.unique(array)) == {1, 2}
    for k, colour in enumerate(LABELS.colours()):
        assert (shown[array == k] == list(bytes.fromhex(colour[1:]))).all()
    np.testing.assert_array_equal(read_labels(tmp_path / "out" / "a_01.png")[0][0], array)


def test_the_labels_of_a_photo_are_png(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (14, 18)).astype(np.uint8)).save(tmp_path / "in/a.jpg")
    predict_files(made(), tmp_path / "in", tmp_path / "out").require_good()
    predict_files(made(), tmp_path / "in" / "a.jpg", tmp_path / "one").require_good()
    for folder in ("out", "one"):
        assert read_labels(tmp_path / folder / "a.png")[0].shape == (1, 14, 18)


def test_the_uncertainty_of_pictures_needs_no_other_library(tmp_path: Path) -> None:
    root = picture_dataset(tmp_path / "set")
    predict_files(made(), root, tmp_path / "out", uncertainty=True).require_good()
    entropy = made().examine(root / "imagesTr" / "a_01_0000.png").entropy
    np.testing.assert_allclose(read_image(tmp_path / "out" / "uncertainty" / "a_01.nii.gz").array[0, 0], entropy)


def test_a_folder_holds_the_predictions_of_one_model(tmp_path: Path) -> None:
    source = write(tmp_path / "scan.nii.gz")
    predict_files(made(), source, tmp_path / "out")
    for predictor, options in (
        (made(identity="two"), {}),
        (made(), {"tta": "flip"}),
        (made(), {"largest_component": True}),
    ):
        with pytest.raises(PclmixError, match="holds predictions of another"):
            predict_files(predictor, source, tmp_path / "out", **options)
    assert read_json(tmp_path / "out" / RECORD)["labels"] == {"background": 0, "dark": 1, "bright": 2}
    assert '"bright"' in (tmp_path / "out" / SNAP).read_text()


def test_one_file_to_one_named_file(tmp_path: Path) -> None:
    source = write(tmp_path / "scan.nii.gz")
    predict_files(made(), source, tmp_path / "mine" / "seg.nii.gz")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["seg.nii.gz"]
    assert predict_files(made(), source, tmp_path / "mine" / "seg.nii.gz").skipped == ["scan"]
    labels = made().predict_file(source, tmp_path / "api.nii.gz")
    np.testing.assert_array_equal(labels, read_labels(tmp_path / "mine" / "seg.nii.gz")[0])


def picture_dataset(root: Path, ending: str = ".png") -> Path:
    for folder in ("imagesTr", "labelsTr"):
        (root / folder).mkdir(parents=True)
    for k, case in enumerate(("a_01", "b_01", "c_01")):
        grey = np.random.default_rng(k).integers(0, 255, (14, 18)).astype(np.uint8)
        Image.fromarray(grey).save(root / "imagesTr" / f"{case}_0000{ending}")
        Image.fromarray(np.zeros((14, 18), np.uint8)).save(root / "labelsTr" / f"{case}{ending}")
    table = {"background": 0, "dark": 1, "bright": 2, "ignore": 3}
    content = {"channel_names": {"0": "x"}, "labels": table, "numTraining": 3, "file_ending": ending, "name": "set"}
    write_json(root / "dataset.json", content)
    write_json(root / "splits_final.json", [{"train": ["a_01"], "val": ["b_01", "c_01"]}])
    return root


def test_a_dataset_of_pictures(tmp_path: Path) -> None:
    root = picture_dataset(tmp_path / "set")
    outcome = predict_files(made(), root, tmp_path / "out", fold=1)
    assert (outcome.done, outcome.trained_on) == (["b_01", "c_01"], 0)
    labels, _ = read_labels(tmp_path / "out" / "b_01.png")
    assert labels.shape == (1, 14, 18)
    assert set(np.unique(labels)) == {1, 2}
    whole = predict_files(made(), root, tmp_path / "whole")
    assert (len(whole.done), whole.trained_on) == (3, 1)


def test_the_spacing_of_a_stack_goes_beside_it(tmp_path: Path) -> None:
    import tifffile

    (tmp_path / "in").mkdir()
    stack = np.random.default_rng(0).integers(0, 99, (3, 9, 8)).astype(np.uint8)
    tifffile.imwrite(tmp_path / "in" / "a_0000.tif", stack, photometric="minisblack")
    write_json(tmp_path / "in" / "a.json", {"spacing": [4.0, 0.5, 0.5]})
    predict_files(made(), tmp_path / "in", tmp_path / "out")
    labels, geometry = read_labels(tmp_path / "out" / "a.tif")
    assert (labels.shape, geometry.spacing) == ((3, 9, 8), (4.0, 0.5, 0.5))


def test_inputs_refused(tmp_path: Path, phantom_dataset: Path) -> None:
    def attempt(words: str, source: Path, out: Path = tmp_path / "out", **options: object) -> None:
        with pytest.raises(PclmixError, match=words):
            predict_files(made(), source, out, **options)  # type: ignore[arg-type]

    (tmp_path / "empty").mkdir()
    scan = write(tmp_path / "scan.nii.gz")
    attempt("does not exist", tmp_path / "none")
    attempt("holds no images", tmp_path / "empty")
    attempt("not a dataset", tmp_path / "empty", fold=1)
    attempt("the model knows the classes background, dark, bright", phantom_dataset)
    root = picture_dataset(tmp_path / "set")
    attempt("fold 4 does not exist", root, fold=4)
    attempt("is a file; OUT must be a folder", root, scan)
    (tmp_path / "notes.md").write_text("")
    attempt("unknown file ending", tmp_path / "notes.md")
    shutil.copy(scan, root / "imagesTr" / "a_01.nii.gz")
    attempt("both case 'a_01'", root / "imagesTr")
    with pytest.raises(PclmixError, match=r"\b2 channel"):
        predict_files(made(2), root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["y.png", "y.txt"])
def test_a_file_that_cannot_be_written_leaves_no_folder(tmp_path: Path, name: str) -> None:
    scan = write(tmp_path / "scan.nii.gz")
    with pytest.raises(PclmixError, match=re.escape(name)):
        made().predict_file(scan, tmp_path / "new" / name)
    assert not (tmp_path / "new").exists()


def test_memory_is_bounded_by_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No case is read before the earlier ones, except a few, have been predicted."""
    for k in range(12):
        write(tmp_path / "in" / f"case{k:02d}.nii.gz", seed=k)
    predictor = made()
    read, label = predictor.read, predictor.label
    counts = {"read": 0, "through": 0, "most": 0}

    def counted_read(paths: object) -> object:
        counts["read"] += 1
        counts["most"] = max(counts["most"], counts["read"] - counts["through"])
        return read(paths)  # type: ignore[arg-type]

    def counted_label(*arguments: object) -> object:
        result = label(*arguments)  # type: ignore[arg-type]
        counts["through"] += 1
        return result

    monkeypatch.setattr(predictor, "read", counted_read)
    monkeypatch.setattr(predictor, "label", counted_label)
    assert len(predict_files(predictor, tmp_path / "in", tmp_path / "out").done) == 12
    assert counts["most"] <= 4


def test_dataset_cases_keep_their_names(tmp_path: Path, phantom_dataset: Path, tiny_run: Path) -> None:
    from pclmix.inference import load

    outcome = predict_files(load(tiny_run, device="cpu"), phantom_dataset, tmp_path / "out", fold=1)
    assert outcome.done == list(Dataset.open(phantom_dataset).fold(1).test)
    for case in outcome.done:
        labels, geometry = read_labels(tmp_path / "out" / f"{case}.nii.gz")
        _, reference = Dataset.open(phantom_dataset).read_reference(case)
        assert geometry.same_grid(reference) == ""
        assert labels.max() < 4
