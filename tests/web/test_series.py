"""Dropped DICOM files: each series becomes a case with geometry; unreadable files are reported."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from uploading import listing, send, zipped

from pclmix.data.dataset import write_dataset_json
from pclmix.labels import Labels
from pclmix.web import series
from pclmix.web.archives import Limits
from pclmix.web.series import Dropped, Found, names

pytest.importorskip("pydicom", reason="pydicom is not installed: pip install 'pclmix[dicom]'")


def folder(name: str, files: list[bytes]) -> dict[str, bytes]:
    """Files with meaningless names, in shuffled order."""
    return {f"{name}/IM{(7 * z) % 11:04d}": content for z, content in enumerate(files)}


def test_dicom_folder_becomes_a_case_with_geometry(page, slices):
    answer = send(page, "scan.zip", zipped(folder("Scan (7)/SE01", slices("1.2.3"))))
    assert answer.json() == {"cases": ["SE01"], "notes": []}
    image = nib.load(page.root / "imagesTr" / "SE01_0000.nii.gz")
    np.testing.assert_array_equal(np.asarray(image.dataobj).transpose(2, 1, 0), slices.values())
    place = slices.place(5, 7, 2)
    np.testing.assert_allclose(image.affine @ [5, 7, 2, 1], [*place, 1], atol=1e-3)
    label = nib.load(page.root / "labelsTr" / "SE01.nii.gz")
    np.testing.assert_allclose(label.affine, image.affine, atol=1e-4)
    assert (np.asarray(label.dataobj) == 3).all()
    assert b"Doe" not in (page.root / "imagesTr" / "SE01_0000.nii.gz").read_bytes()
    assert {c["name"] for c in page.client.get("/api/dataset").json()["cases"]} == {"case1", "case2", "SE01"}


def test_single_slice_with_a_channel_like_name(page, slices):
    assert send(page, "IM1", slices("1.2.3", count=1)[0]).json()["cases"] == ["7_short_axis"]
    assert send(page, "a.zip", zipped(folder("scan_0001", slices("1.2.4")))).json()["cases"] == ["scan_0001"]
    assert (page.root / "imagesTr" / "scan_0001_0000.nii.gz").exists()


def test_several_series_and_unreadable_files(page, slices):
    cine = slices("1.2.5") + slices("1.2.5")
    files = {
        **folder("p1/SE0", slices("1.2.3")),
        **{f"p1/SE0/x{k}": f for k, f in enumerate(slices("1.2.4", 3, SeriesNumber=9, SeriesDescription="../../é b"))},
        **{f"p1/cine/{k}": f for k, f in enumerate(cine)},
        "p1/broken": slices("1.2.6", 1)[0][:140] + b"\xff" * 300,
        "p1/readme.txt": b"hello",
        "p1/.DS_Store": b"\0" * 200,
    }
    answer = send(page, "p1.zip", zipped(files)).json()
    assert answer["cases"] == ["p1_SE0_7_short_axis", "p1_SE0_9_e_b"]
    assert any(
        n.startswith("p1_cine_7_short_axis: ") and "several images have one position" in n for n in answer["notes"]
    )
    assert any("1 DICOM file cannot be read" in note and "broken" in note for note in answer["notes"])
    assert len(answer["notes"]) == 2
    assert not any(str(page.root) in note or "incoming" in note for note in answer["notes"])
    assert not list((page.root / ".pclmix" / "incoming").iterdir())


def test_duplicate_names_and_duplicate_scans(page, slices):
    assert send(page, "a.zip", zipped(folder("DICOM", slices("1.2.3")))).json()["cases"] == ["DICOM"]
    again = send(page, "a.zip", zipped(folder("DICOM", slices("1.2.3"))))
    assert again.status_code == 400
    assert "as DICOM" in again.json()["error"]
    assert send(page, "a.zip", zipped(folder("DICOM", slices("1.2.4", 3)))).json()["cases"] == ["DICOM_2"]


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "..\\..\\evil", "a/../../../evil", "evil\n", "é", "."])
def test_names_cannot_traverse(page, name, slices):
    outside = {p for p in page.root.parent.rglob("*") if page.root not in p.parents}
    answer = send(page, "x.zip", zipped(folder(name, slices("1.2.3"))))
    assert answer.status_code == (400 if ".." in name else 200)
    for case in answer.json().get("cases", []):
        assert (page.root / "imagesTr" / f"{case}_0000.nii.gz").exists()
    assert {p for p in page.root.parent.rglob("*") if page.root not in p.parents} == outside


def deflated(plain: bytes, size: int) -> bytes:
    """A small deflated file that inflates to `size` bytes."""
    before, uid = b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.1.99"
    at = plain.index(b"UI" + len(before).to_bytes(2, "little") + before)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return plain[:at] + b"UI" + len(uid).to_bytes(2, "little") + uid + packer.compress(b"\0" * size) + packer.flush()


def test_bombs_and_limits(serve, dataset, slices):
    page = serve(dataset, limits=Limits(upload=200_000, unpacked=1_000_000, files=20))
    before = listing(dataset)
    huge = slices("1.2.3", 2, Rows=60_000, Columns=60_000)
    attempts = {
        "many files": (413, zipped({f"s/{k}": b"\0" for k in range(21)})),
        "zip bomb": (413, zipped({"s/a": slices("1.2.3", 1)[0] + b"\0" * 5_000_000})),
        "claims huge pixels": (400, zipped(folder("s", huge))),
        "deflated": (400, zipped({"s/a": deflated(slices("1.2.3", 1)[0], 50_000_000)})),
        "many frames": (400, zipped(folder("s", slices("1.2.3", 2, NumberOfFrames=2_000_000_000)))),
    }
    for what, (status, content) in attempts.items():
        answer = send(page, "s.zip", content)
        assert answer.status_code == status, (what, answer.text)
        assert listing(dataset) == before, what
    assert "deflated" in send(page, "s.zip", attempts["deflated"][1]).json()["error"]


def test_negative_frame_count_does_not_raise_the_budget(serve, dataset, slices):
    page = serve(dataset, limits=Limits(unpacked=100_000))
    content = folder(
        "s", [*slices("1.2.3", 2, Rows=6000, Columns=6000), *slices("1.2.3", 1, NumberOfFrames=-1_000_000)]
    )
    assert "--max-upload" in send(page, "s.zip", zipped(content)).json()["error"]


def test_invalid_header_fails_only_its_series(page, slices):
    odd = slices("1.2.3", 2, ImageOrientationPatient=[1, 0, 0, 0])
    answer = send(page, "s.zip", zipped({**folder("odd", odd), **folder("good", slices("1.2.4"))})).json()
    assert answer["cases"] == ["good"]
    assert len(answer["notes"]) == 1
    assert "ImageOrientationPatient" in answer["notes"][0]
    assert "6 numbers are needed" in answer["notes"][0]


def test_empty_rescale_slope(page, slices):
    send(page, "s.zip", zipped(folder("s", slices("1.2.3", RescaleSlope=None, RescaleIntercept=None))))
    image = nib.load(page.root / "imagesTr" / "s_0000.nii.gz")
    np.testing.assert_array_equal(np.asarray(image.dataobj).transpose(2, 1, 0), slices.values())


def test_equal_file_names_in_several_folders(page, slices):
    """The third would be renamed to 2_a, the name of the first."""
    a, b, c = slices("1.2.3", 3)
    assert send(page, "s.zip", zipped({"s/x/2_a": a, "s/x/a": b, "s/y/a": c})).json()["cases"] == ["s"]
    assert nib.load(page.root / "imagesTr" / "s_0000.nii.gz").shape[2] == 3


def test_failed_write_leaves_nothing_behind(page, monkeypatch, slices):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = listing(page.root)
    monkeypatch.setattr("pclmix.web.uploads.copy_bytes", fail)
    answer = send(page, "a.zip", zipped(folder("s", slices("1.2.3"))))
    assert answer.status_code == 507
    assert "full" in answer.json()["error"]
    assert listing(page.root) == before


def test_missing_extra(page, monkeypatch, slices):
    monkeypatch.setitem(sys.modules, "pydicom", None)
    monkeypatch.setattr(series, "find_spec", lambda _: None)
    before = listing(page.root)
    answer = send(page, "a.zip", zipped(folder("s", slices("1.2.3"))))
    assert answer.status_code == 400
    assert "pip install '.[dicom]'" in answer.json()["error"]
    assert page.client.get("/api/dataset").json()["takes"]["dicom"] is False
    assert listing(page.root) == before


def test_dicom_into_a_picture_dataset(serve, tmp_path, slices):
    root = tmp_path / "pictures"
    (root / "imagesTr").mkdir(parents=True)
    (root / "labelsTr").mkdir()
    write_dataset_json(root, channels=["red"], labels=Labels(("background", "a"), 2), ending=".png", cases=0)
    answer = send(serve(root), "a.zip", zipped(folder("s", slices("1.2.3"))))
    assert answer.status_code == 400
    assert ".png pictures" in answer.json()["error"]


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        ([("a", "p1"), ("a", "p2")], ["p1", "p2"]),
        ([("p1", "SE0"), ("p2", "SE0")], ["p1_SE0", "p2_SE0"]),
        ([("p",), ("p",)], ["p_1_w", "p_1_w_2"]),
        ([(), ()], ["1_w", "1_w_2"]),
        ([("x" * 300,)], ["x" * 80]),
    ],
)
def test_names(folders, expected):
    assert names([Found("1", "w", [Dropped(Path("f"), f, "f")]) for f in folders]) == expected
