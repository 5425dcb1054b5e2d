"""Reports of `check` on valid and invalid datasets; bad files are in test_bad_input.py."""

from __future__ import annotations

import json
import re

import nibabel as nib
import numpy as np
import pytest

from pclmix.data.check import check, require_sound
from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError

CASE = "patient001_frame01"


def edit(path, change) -> None:
    image = nib.load(path)
    array = np.asarray(image.dataobj).copy()
    change(array)
    nib.save(nib.Nifti1Image(array, None, image.header), path)


def test_a_sound_dataset(dataset, run):
    report = check(Dataset.open(dataset))
    assert report.findings == ()
    assert (report.cases, report.references) == (6, 6)
    # One of 12 rows is drawn; 2 of its 10 columns are each class, the other 4 background.
    assert [c.share for c in report.classes] == pytest.approx([4 / 120, 2 / 120, 2 / 120, 2 / 120])
    result = run("check", dataset)
    assert result.code == 0
    assert "0 errors, 0 warnings" in result.out


def test_contradictions_are_counted_and_placed(dataset, run):
    def wrong(array):
        array[2, 4, 1], array[3, 4, 1], array[6, 4, 2] = 2, 2, 0

    edit(dataset / "labelsTr" / f"{CASE}.nii.gz", wrong)
    result = run("check", dataset, "--json")
    assert result.code == 0
    content = json.loads(result.out)
    assert content["contradictions"] == {"cases": 1, "pixels": 3}
    (finding,) = content["findings"]
    assert (finding["level"], finding["case"], finding["file"]) == ("warning", CASE, f"labelsTr/{CASE}.nii.gz")
    assert finding["where"][0] == {"z": 1, "y": 4, "x": 2, "drawn": "Myo", "reference": "RV"}
    assert finding["where"][2] == {"z": 2, "y": 4, "x": 6, "drawn": "background", "reference": "LV"}
    assert check(Dataset.open(dataset), references=False).findings == ()


def test_a_class_without_a_stroke_is_a_warning(dataset, run):
    edit(dataset / "labelsTr" / f"{CASE}.nii.gz", lambda a: a.__setitem__(a == 3, 4))
    result = run("check", dataset, "--json")
    assert result.code == 0
    (finding,) = json.loads(result.out)["findings"]
    assert (finding["level"], finding["case"]) == ("warning", CASE)
    assert "LV" in finding["message"]
    assert [c.cases for c in check(Dataset.open(dataset)).classes] == [6, 6, 6, 5]


def test_sform_against_pixdim_is_reported_once(dataset, run):
    for path in (p for folder in ("imagesTr", "labelsTr", "referenceTr") for p in (dataset / folder).iterdir()):
        image = nib.load(path)
        data, header = np.asarray(image.dataobj), image.header
        header["srow_x"], header["srow_y"], header["srow_z"] = [-1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 1, 0]
        nib.save(nib.Nifti1Image(data, None, header), path)
    result = run("check", dataset, "--json")
    (finding,) = json.loads(result.out)["findings"]
    assert result.code == 0
    assert (finding["kind"], finding["level"], finding["count"]) == ("sform", "warning", 6)
    assert all(f"{spacing} mm" in finding["message"] for spacing in ("1 x 1 x 1", "1.5 x 1.5 x 8"))


def test_all_bad_files_are_reported_at_once(dataset, run):
    (dataset / "imagesTr" / f"{CASE}_0000.nii.gz").write_bytes(b"junk")
    (dataset / "labelsTr" / "patient002_frame01.nii.gz").unlink()
    (dataset / "referenceTr" / "patient030_frame12.nii.gz").write_bytes(b"")
    (dataset / "referenceTr" / "patient999_frame01.nii.gz").write_bytes(b"")
    (dataset / "imagesTr" / "patient002_frame12.nii.gz").write_bytes(b"")
    (dataset / "imagesTr" / "patient002_frame12_0001.nii.gz").write_bytes(b"")
    (dataset / "imagesTr" / "._patient002_frame12_0000.nii.gz").write_bytes(b"")
    content = json.loads(run("check", dataset, "--json").out)
    assert sorted(f["file"] for f in content["findings"]) == [
        "imagesTr/patient001_frame01_0000.nii.gz",
        "imagesTr/patient002_frame12.nii.gz",
        "imagesTr/patient002_frame12_0001.nii.gz",
        "labelsTr/patient002_frame01.nii.gz",
        "referenceTr/patient030_frame12.nii.gz",
        "referenceTr/patient999_frame01.nii.gz",
    ]
    assert content["errors"] == 6
    result = run("check", dataset)
    assert result.code == 2
    assert sum(f["file"] in result.err for f in content["findings"]) == 3  # the others are counted


def test_only_requested_cases_are_checked(dataset):
    opened = Dataset.open(dataset)
    (dataset / "imagesTr" / f"{CASE}_0000.nii.gz").write_bytes(b"junk")
    (dataset / "referenceTr" / "patient002_frame01.nii.gz").write_bytes(b"junk")
    with pytest.raises(PclmixError, match=CASE):
        require_sound(opened, check(opened, [CASE], references=False).findings)
    require_sound(opened, check(opened, ["patient002_frame01"], references=False).findings)
    with pytest.raises(PclmixError, match="referenceTr"):
        require_sound(opened, check(opened, ["patient002_frame01"]).findings)


def test_library_errors_become_findings(dataset):
    path = dataset / "imagesTr" / f"{CASE}_0000.nii.gz"
    image = nib.load(path)
    data, header = np.asarray(image.dataobj), image.header
    header["sform_code"], header["qform_code"] = 0, 1
    header["quatern_b"] = header["quatern_c"] = 5.0  # no rotation has such a quaternion
    nib.save(nib.Nifti1Image(data, None, header), path)
    (finding,) = check(Dataset.open(dataset)).errors
    assert finding.case == CASE
    assert str(path) in finding.message


def test_strokes_lost_at_working_size(dataset, run):
    """Two classes in one pixel: one of them has to go, and the warning names it and the case."""
    report = check(Dataset.open(dataset), size=(64, 64))
    assert [c.kept for c in report.classes] == [1.0] * 4
    result = run("check", dataset, "--size", 1, 1, "--json")
    assert result.code == 0
    content = json.loads(result.out)
    assert content["size"] == [1, 1]
    assert sum(c["kept"] for c in content["classes"]) < 4
    found = [f for f in content["findings"] if f["kind"] == "class vanishes"]
    assert {f["case"] for f in found} == set(Dataset.open(dataset).cases)
    assert all(f["level"] == "warning" for f in found)


def test_habits_are_tested_where_all_classes_are_annotated(dataset, edit_json):
    edit_json(dataset / "dataset.json", lambda d: d.update(habits={"LV": ["pieces"]}))
    opened = Dataset.open(dataset)
    everywhere = check(opened).habits[0].masks.tested
    edit_json(dataset / "dataset.json", lambda d: d.update(not_annotated={CASE: ["RV"]}))
    assert check(Dataset.open(dataset)).habits[0].masks.tested < everywhere
    edit_json(dataset / "dataset.json", lambda d: d.update(not_annotated={c: ["RV"] for c in opened.cases}))
    assert all(habit.masks.tested == 0 for habit in check(Dataset.open(dataset)).habits)


def test_unannotated_class_is_not_reported_missing(dataset, run, edit_json):
    edit(dataset / "labelsTr" / f"{CASE}.nii.gz", lambda a: a.__setitem__(a == 3, 4))
    edit_json(dataset / "dataset.json", lambda d: d.update(not_annotated={CASE: ["LV"]}))
    assert check(Dataset.open(dataset)).findings == ()
    edit_json(dataset / "dataset.json", lambda d: d.update(not_annotated={CASE: ["Myo"]}))
    kinds = {f.kind for f in check(Dataset.open(dataset)).findings}
    assert kinds == {"not annotated", "class without a stroke"}
    for wrong, key in (({"nobody": ["LV"]}, "nobody"), ({CASE: ["LW"]}, "LW"), ([CASE], "not_annotated")):
        edit_json(dataset / "dataset.json", lambda d, wrong=wrong: d.update(not_annotated=wrong))
        result = run("check", dataset)
        assert result.code == 2
        assert key in result.err


def test_missing_channels_are_one_finding(dataset, run, edit_json):
    edit_json(dataset / "dataset.json", lambda d: d.update(channel_names={"0": "MRI", "1": "CT"}))
    (finding,) = check(Dataset.open(dataset)).errors
    assert (finding.kind, finding.file, finding.count) == ("channels", "dataset.json", 6)
    result = run("check", dataset)
    assert result.code == 2
    assert len(result.err.strip().splitlines()) <= 2
    assert "channel_names" in result.err


def test_extra_channels_are_one_finding(dataset):
    for path in list((dataset / "imagesTr").iterdir()):
        path.with_name(path.name.replace("_0000", "_0001")).write_bytes(path.read_bytes())
    (finding,) = check(Dataset.open(dataset)).errors
    assert finding.file == "imagesTr/patient001_frame01_0001.nii.gz"


def test_the_table_shows_a_few_findings_of_a_kind(dataset, run, monkeypatch):
    monkeypatch.setattr("pclmix.cli.data._ROWS", 2)
    for path in (dataset / "labelsTr").iterdir():
        edit(path, lambda a: a.__setitem__(a == 3, 4))
    result = run("check", dataset)
    assert result.code == 0
    assert sum(case in result.out for case in Dataset.open(dataset).cases) == 2
    assert re.search(r"\b4 more\b", result.out)
    assert len(json.loads(run("check", dataset, "--json").out)["findings"]) == 6
