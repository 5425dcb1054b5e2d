"""Invalid input on the command line: one message with the file, exit code 2, no files left."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

CASE = "patient001_frame01"


def resave(path: Path, change=lambda a: a, spacing=(1.5, 1.5, 8.0)) -> None:
    array = change(np.asarray(nib.load(path).dataobj))
    nib.save(nib.Nifti1Image(array, np.diag([*spacing, 1.0])), path)


def cut_short(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def wrong_checksum(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-8] ^= 0xFF
    path.write_bytes(bytes(content))


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def not_an_image(path: Path) -> None:
    path.write_bytes(gzip.compress(b"hello" * 200))


def spoil(value: float):
    def change(array: np.ndarray) -> np.ndarray:
        out = array.astype(np.float32)
        out[0, 0, 0] = value
        return out

    return lambda path: resave(path, change)


#: How a file is damaged, and what the message names besides the file.
BAD_IMAGES = {
    "missing": (Path.unlink, ""),
    "folder": (folder_instead, "folder"),
    "truncated": (cut_short, "truncated"),
    "checksum": (wrong_checksum, "damaged"),
    "nothing": (lambda p: p.write_bytes(b""), "empty"),
    "nonsense": (not_an_image, ""),
    "nan": (spoil(np.nan), "NaN"),
    "infinite": (spoil(np.inf), "infinite"),
    "4d": (lambda p: resave(p, lambda a: np.stack([a, a], -1)), "3D"),
    "empty": (lambda p: resave(p, lambda a: a[:, :, :0]), "empty"),
    "shape": (lambda p: resave(p, lambda a: a[:-1]), "shape"),
    "spacing": (lambda p: resave(p, spacing=(1.5, 1.5, 9.0)), "spacing"),
}
BAD_LABELS = {
    "missing": (Path.unlink, ""),
    "folder": (folder_instead, "folder"),
    "truncated": (cut_short, "truncated"),
    "range": (lambda p: resave(p, lambda a: np.where(a == 2, 9, a).astype(np.uint8)), r"\b9\b"),
    "negative": (lambda p: resave(p, lambda a: a.astype(np.int16) - 1), r"-1\b"),
    "fractions": (lambda p: resave(p, lambda a: a.astype(np.float32) * 0.5), "whole"),
    "nan": (spoil(np.nan), "whole"),
    "4d": (lambda p: resave(p, lambda a: np.stack([a, a], -1)), "3D"),
    "shape": (lambda p: resave(p, lambda a: a[:, :-1]), "shape"),
    "spacing": (lambda p: resave(p, spacing=(1.5, 1.5, 9.0)), "spacing"),
}


def assert_refused(result, *patterns: str) -> None:
    assert result.code == 2, result
    assert "Traceback" not in result.err + result.out
    message = " ".join(result.err.split("error: ")[-1].split())
    assert result.err.count("error: ") == 1
    for pattern in patterns:
        assert re.search(pattern, message), message


def left_behind(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("how", sorted(BAD_IMAGES))
def test_check_refuses_an_image(how, dataset, run):
    harm, words = BAD_IMAGES[how]
    harm(dataset / "imagesTr" / f"{CASE}_0000.nii.gz")
    assert_refused(run("check", dataset), words, CASE)


# A case without a dense mask is valid, so a missing one is not an error.
DENSE = [how for how in sorted(BAD_LABELS) if how != "missing"]


@pytest.mark.parametrize(
    ("folder", "how"), [*(("labelsTr", how) for how in sorted(BAD_LABELS)), *(("referenceTr", how) for how in DENSE)]
)
def test_check_refuses_labels(folder, how, dataset, run):
    harm, words = BAD_LABELS[how]
    harm(dataset / folder / f"{CASE}.nii.gz")
    assert_refused(run("check", dataset), words, rf"{folder}/{CASE}\.nii\.gz")


@pytest.mark.parametrize("how", sorted(set(BAD_IMAGES) - {"missing"}))
def test_import_refuses_an_image(how, acdc_tree, tmp_path, run):
    harm, words = BAD_IMAGES[how]
    harm(acdc_tree / "patient001" / f"{CASE}.nii.gz")
    before = left_behind(tmp_path)
    if how == "folder":  # not counted as an image, so that its scribble has none
        words = "scribble"
    assert_refused(run("import", "acdc", acdc_tree, tmp_path / "out"), words, CASE)
    assert left_behind(tmp_path) == before


@pytest.mark.parametrize(
    ("kind", "how"),
    [*(("scribble", how) for how in sorted(BAD_LABELS)), *(("gt", how) for how in DENSE if how != "folder")],
)
def test_import_refuses_labels(kind, how, acdc_tree, tmp_path, run):
    harm, words = BAD_LABELS[how]
    if how == "folder":
        words = "scribble"
    harm(acdc_tree / "patient001" / f"{CASE}_{kind}.nii.gz")
    before = left_behind(tmp_path)
    assert_refused(run("import", "acdc", acdc_tree, tmp_path / "out"), words, f"{CASE}_{kind}")
    assert left_behind(tmp_path) == before


def test_whole_numbers_stored_as_float_are_accepted(dataset, acdc_tree, tmp_path, run):
    resave(dataset / "labelsTr" / f"{CASE}.nii.gz", lambda a: a.astype(np.float64))
    assert run("check", dataset).code == 0
    resave(acdc_tree / "patient001" / f"{CASE}_scribble.nii.gz", lambda a: a.astype(np.float32))
    assert run("import", "acdc", acdc_tree, tmp_path / "out").code == 0
    written = nib.load(tmp_path / "out" / "labelsTr" / f"{CASE}.nii.gz")
    assert written.get_data_dtype() == np.uint8


def test_one_case_in_two_folds(dataset, run, edit_json):
    edit_json(dataset / "splits_final.json", lambda s: s[1]["val"].append(CASE) or s[1]["train"].remove(CASE))
    result = run("check", dataset)
    assert_refused(result, "splits_final.json", CASE, r"\b1 and 2\b", "pclmix split")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s[0]["train"].append(CASE), f"'{CASE}'.*'train'.*'val'.*fold 1"),
        (lambda s: s[0]["val"].remove(CASE) or s[0]["train"].append(CASE), "patient 'patient001'.*'train'"),
        (lambda s: s[0]["val"].append(CASE), CASE),
        (lambda s: s[0]["val"].append("patient009_frame01"), "'patient009_frame01'"),
        (lambda s: s[0].pop("val"), "val"),
        (lambda s: s.clear(), "pclmix split"),
    ],
)
def test_leaking_splits_are_refused(change, words, dataset, run, edit_json):
    edit_json(dataset / "splits_final.json", change)
    assert_refused(run("check", dataset), "splits_final.json", words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(lables=d.pop("labels")), "'labels'.*'lables'"),
        (lambda d: d.update(file_ending=".nii.gzz"), r"file_ending '\.nii\.gzz'"),
        (lambda d: d["labels"].update(ignore=7), r"'ignore'.*\b4\b"),
        (lambda d: d["labels"].update(LV=[1, 2]), "'LV'"),
        (lambda d: d["labels"].update(LV="three"), "'LV'"),
        (lambda d: d.update(numTraining=5), r"numTraining.*\b5\b.*\b6\b"),
        (lambda d: d.update(channel_names=["MRI"]), "channel_names"),
        (lambda d: d.update(patient_pattern="("), "patient_pattern"),
        (lambda d: d.update(patient_pattern="([^_]+)_"), "patient_pattern.*'patient'"),
        (lambda d: d.update(file_ending=".nii"), r"\.nii\.gz.*file_ending"),
    ],
)
def test_invalid_dataset_json(change, words, dataset, run, edit_json):
    edit_json(dataset / "dataset.json", change)
    assert_refused(run("check", dataset), words)
    broken = run("check", dataset, "--json")
    report = json.loads(broken.out)
    assert (broken.code, report["ok"]) == (2, False)
    assert re.search(words, report["findings"][0]["message"])


def test_dataset_json_that_is_not_json(dataset, run):
    (dataset / "dataset.json").write_text('{"labels": ')
    assert_refused(run("check", dataset), r"dataset\.json", "JSON")


def test_json_may_start_with_a_byte_order_mark(dataset, run):
    content = (dataset / "dataset.json").read_text()
    (dataset / "dataset.json").write_text(content, encoding="utf-8-sig")
    assert run("check", dataset).code == 0


def test_not_a_dataset(dataset, tmp_path, run):
    assert_refused(run("check", tmp_path / "nowhere"), "nowhere", "pclmix import")
    assert_refused(run("check", dataset / "dataset.json"), r"dataset\.json", "folder")
    assert_refused(run("check", dataset / "imagesTr"), "imagesTr", r"dataset\.json")


def test_cases_without_any_stroke(dataset, run):
    """A single such case is unlabelled and check warns; a dataset of only such cases is refused."""
    resave(dataset / "labelsTr" / f"{CASE}.nii.gz", lambda a: np.full_like(a, 4))
    result = run("check", dataset, "--json")
    assert result.code == 0
    (finding,) = (found for found in json.loads(result.out)["findings"] if found["kind"] == "empty")
    assert (finding["level"], finding["case"]) == ("warning", CASE)
    for path in (dataset / "labelsTr").iterdir():
        resave(path, lambda a: np.full_like(a, 4))
    assert_refused(run("check", dataset), f"{re.escape(str(dataset))}:.*stroke")


def test_output_that_exists(acdc_tree, dataset, run):
    before = {p: p.read_bytes() for p in dataset.rglob("*") if p.is_file()}
    assert_refused(run("import", "acdc", acdc_tree, dataset), re.escape(str(dataset)))
    assert {p: p.read_bytes() for p in dataset.rglob("*") if p.is_file()} == before


def test_output_that_cannot_be_written(acdc_tree, tmp_path, run):
    (tmp_path / "file").write_text("in the way")
    target = tmp_path / "file" / "out"
    assert_refused(run("import", "acdc", acdc_tree, target), re.escape(str(target)))
    assert left_behind(tmp_path) == ["file", "tree"]


def test_sources_that_are_not_there(acdc_tree, tmp_path, run):
    out = tmp_path / "out"
    assert_refused(run("import", "acdc", tmp_path / "nowhere", out), "nowhere")
    assert_refused(run("import", "acdc", acdc_tree, out, "--scribbles", tmp_path / "none"), "none")
    single = acdc_tree / "patient001" / f"{CASE}.nii.gz"
    assert_refused(run("import", "acdc", single, out), re.escape(single.name), "folder")
    assert_refused(run("import", "acdcc", acdc_tree, out), "'acdcc'", "'acdc'")
    assert_refused(run("import", "acdc", acdc_tree, out, "--classes", "a,b"), "--classes", "acdc")
    shutil.rmtree(acdc_tree)
    acdc_tree.mkdir()
    for kind in ("acdc", "wsl4mis", "folder"):
        assert_refused(run("import", kind, acdc_tree, out), "tree")
    assert not out.exists()


def test_split_refuses(dataset, run):
    before = (dataset / "splits_final.json").read_bytes()
    assert_refused(run("split", dataset, "--folds", 4), r"\b4\b.*\b3\b")
    assert_refused(run("split", dataset, "--kind", "patents"), "'patient'")
    assert_refused(run("split", dataset, "--kind", "acdc", "--folds", 4), "--kind acdc", r"\b2\b")
    assert (dataset / "splits_final.json").read_bytes() == before
