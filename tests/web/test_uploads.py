"""Dropped files: valid ones become cases, invalid ones leave nothing behind."""

from __future__ import annotations

import errno
import gzip
import io
import stat
import zipfile

import nibabel as nib
import numpy as np
import pytest
from PIL import Image
from uploading import listing, send, zipped

from pclmix.data.check import check
from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.web import archives
from pclmix.web.archives import Limits, clean_name
from pclmix.web.workspace import make_dataset

AFFINE = np.diag([-1.5, 1.25, 8, 1.0])


def nifti(shape: tuple[int, int, int] = (10, 12, 4), value: int = 3) -> bytes:
    return gzip.compress(nib.Nifti1Image(np.full(shape, value, np.int16), AFFINE).to_bytes())


def test_a_dropped_image_becomes_a_case(page):
    content = nifti()
    answer = send(page, "New scan (1).nii.gz", content)
    assert answer.json() == {"cases": ["New_scan_1"], "notes": []}
    assert (page.root / "imagesTr" / "New_scan_1_0000.nii.gz").read_bytes() == content
    dataset = Dataset.open(page.root)
    assert dataset.num_training == 3
    assert not [f for f in check(dataset).errors if "stroke" not in f.message]
    label = nib.load(page.root / "labelsTr" / "New_scan_1.nii.gz")
    assert np.allclose(label.affine, AFFINE)
    assert (np.asarray(label.dataobj) == 3).all()
    again = send(page, "New scan (1).nii.gz", content)
    assert again.status_code == 400
    assert "exists already" in again.json()["error"]
    assert send(page, "Été.nii.gz", content).json()["cases"] == ["Ete"]
    odd = send(page, "four.nii", nib.Nifti1Image(np.zeros((4, 4, 4, 4), np.int16), AFFINE).to_bytes())
    assert odd.json()["error"].startswith("four.nii has 4 dimensions")  # and not in which folder it was for a moment


def test_an_exported_dataset_can_be_dropped_on_another(page, serve, tmp_path):
    archive = page.client.get("/api/export/dataset.zip").content
    names = set(zipfile.ZipFile(io.BytesIO(archive)).namelist())
    assert {"dataset.json", "imagesTr/case1_0000.nii.gz", "labelsTr/case2.nii.gz"} <= names
    assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None
    from pclmix.web.workspace import make_dataset

    make_dataset(tmp_path / "other", ["RV", "LV"])
    other = serve(tmp_path / "other")
    assert send(other, "all.zip", archive).json()["cases"] == ["case1", "case2"]
    for folder, name in (("imagesTr", "case1_0000.nii.gz"), ("labelsTr", "case1.nii.gz")):
        one, two = (np.asarray(nib.load(r / folder / name).dataobj) for r in (page.root, other.root))
        assert np.array_equal(one, two)


@pytest.mark.parametrize(
    "name",
    ["../../evil.nii.gz", "/etc/evil.nii.gz", "..\\..\\evil.nii.gz", "a/b/../../../evil.nii.gz", "evil\n.nii.gz"],
)
def test_names_cannot_traverse(page, name):
    outside = listing(page.root.parent) - {f"small/{p}" for p in listing(page.root)}
    for answer in (send(page, name, nifti()), send(page, "x.zip", zipped({name: nifti(value=4)}))):
        assert answer.status_code in (200, 400)
    assert listing(page.root.parent) - {f"small/{p}" for p in listing(page.root)} == outside
    assert all(p.parent.name in ("imagesTr", "labelsTr") for p in page.root.rglob("*evil*"))


@pytest.mark.parametrize("name", ["", "...", "///", "日本", "a" * 200 + ".nii.gz"])
def test_empty_names_are_refused(name):
    with pytest.raises(PclmixError):
        clean_name(name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.nii.gz", b"not a gzip"),
        ("a.nii.gz", nifti()[:80]),
        ("a.nii.gz", gzip.compress(b"not a nifti")),
        ("a.nii.gz", b""),
        ("a.exe", b"MZ"),
        ("a.pkl", b"\x80\x04."),
        ("a.zip", b"PK not a zip"),
        ("a.zip", zipped({"readme.txt": b"hello"})),
        ("a.zip", zipped({"x/a.nii.gz": nifti(), "y/a.nii.gz": nifti()})),
        ("a.zip", zipped({"a_0001.nii.gz": nifti()})),
        ("a.zip", zipped({"a.nii.gz": nifti()}, zipfile.ZIP_LZMA)),
        ("a.zip", zipped({"a.nii.gz": nifti()}, zipfile.ZIP_BZIP2)),
        ("a.zip", zipped({"é.nii.gz": nifti()}).replace("é".encode(), b"\xff\xfe")),
        ("a.zip", zipped({"QQ": b"nameless", ".": b"\0" * 128 + b"DICM"}).replace(b"QQ", b"\0Q")),
    ],
    ids=[
        "text",
        "cut",
        "no-image",
        "empty",
        "exe",
        "pickle",
        "no-zip",
        "no-images",
        "twice",
        "no-channel-0",
        "lzma",
        "bzip2",
        "odd-letters",
        "no-name",
    ],
)
def test_bad_files_leave_no_trace(page, name, content):
    before = listing(page.root)
    answer = send(page, name, content)
    assert answer.status_code == 400
    assert answer.json()["error"]
    assert listing(page.root) == before


def test_limits(serve, dataset):
    page = serve(dataset, limits=Limits(upload=100_000, unpacked=1_000_000))
    before = listing(dataset)
    bomb = zipped({"a.nii": b"\0" * 5_000_000})
    assert len(bomb) < 100_000
    nested = zipped({"a.nii.gz": gzip.compress(b"\0" * 5_000_000)})
    many = zipped({f"{i}.nii": b"\0" * 300_000 for i in range(5)})
    for name, content in [
        ("a.nii", b"\0" * 200_000),
        ("a.zip", bomb),
        ("b.zip", nested),
        ("c.zip", many),
        ("d.nii.gz", gzip.compress(b"\0" * 5_000_000)),
    ]:
        assert send(page, name, content).status_code == 413, name
    assert listing(dataset) == before


def test_zip_with_wrong_declared_size(serve, dataset):
    page = serve(dataset, limits=Limits(upload=100_000, unpacked=1_000_000))
    content = bytearray(zipped({"a.nii": b"\0" * 5_000_000}))
    size = (5_000_000).to_bytes(4, "little")
    for position in (content.find(size), content.rfind(size)):
        content[position : position + 4] = (10).to_bytes(4, "little")
    before = listing(dataset)
    assert send(page, "a.zip", bytes(content)).status_code in (400, 413)
    assert listing(dataset) == before


def test_links_in_a_zip_are_not_followed(page):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        entry = zipfile.ZipInfo("link.nii.gz")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc/passwd")
        archive.writestr("good.nii.gz", nifti())
    assert send(page, "a.zip", buffer.getvalue()).json()["cases"] == ["good"]


def test_label_map_on_another_grid(page):
    content = zipped({"imagesTr/a_0000.nii.gz": nifti(), "labelsTr/a.nii.gz": nifti((5, 5, 5), 1)})
    answer = send(page, "a.zip", content)
    assert answer.status_code == 400
    assert "does not fit" in answer.json()["error"]


def test_full_disk_while_unpacking(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr("image.nii.gz", b"x")
    monkeypatch.setattr(archives, "_inflate", full)
    with pytest.raises(PclmixError, match="No space left on device"):
        archives.unpack(archive, tmp_path / "out", Limits())


def test_tiff_above_the_unpacked_limit(serve, dataset, tmp_path):
    """Its pages are counted from headers before anything is inflated."""
    import tifffile

    page = serve(dataset, limits=Limits(upload=100_000, unpacked=1_000_000))
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((2000, 2000), np.uint8), compression="zlib")
    content = (tmp_path / "a.tif").read_bytes()
    assert len(content) < 100_000
    assert send(page, "a.tif", content).status_code == 413


def test_photos_become_png_with_the_same_pixels(tmp_path, serve):
    make_dataset(tmp_path / "set", ["one"])
    server = serve(tmp_path / "set")
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3)).astype(np.uint8)).save(buffer, "JPEG")
    answer = server.client.post("/api/import", params={"name": "eye.JPG"}, content=buffer.getvalue())
    assert answer.json()["cases"] == ["eye"]
    stored = np.asarray(Image.open(tmp_path / "set" / "imagesTr" / "eye_0000.png"))
    assert np.array_equal(stored, np.asarray(Image.open(buffer)))
    image = gzip.compress(nib.Nifti1Image(np.zeros((4, 5, 6), np.int16), np.eye(4)).to_bytes())
    refused = server.client.post("/api/import", params={"name": "scan.nii.gz"}, content=image)
    assert refused.status_code == 400
    assert "contains .png images" in refused.json()["error"]
