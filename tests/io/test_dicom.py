"""DICOM series in with their geometry, segmentation objects out, and what is refused."""

from __future__ import annotations

import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import highdicom
import nibabel as nib
import nrrd
import numpy as np
import pydicom
import pytest
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, MRImageStorage, generate_uid
from typer.testing import CliRunner

from pclmix.cli import app
from pclmix.errors import PclmixError
from pclmix.io import dicom
from pclmix.io.volume import Geometry, read_image, write_nrrd
from pclmix.labels import Labels

#: An oblique slice plane: directions along a row and down a column, and the normal.
ACROSS, DOWN = np.array([0.8, 0.6, 0.0]), np.array([0.0, 0.0, -1.0])
NORMAL = np.cross(ACROSS, DOWN)
ORIGIN, GAP, SPACING = np.array([-30.0, 12.0, 55.0]), 8.0, (1.25, 1.5)  # SPACING: down a column, along a row


def make_series(folder: Path, count: int = 4, uid: str | None = None, shape: tuple[int, int] = (20, 24)) -> np.ndarray:
    """Slices written in shuffled order under names that say nothing; returns (Z, H, W)."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    volume = rng.integers(0, 1000, (count, *shape)).astype(np.int16)
    uid, study, frame = uid or generate_uid(), generate_uid(), generate_uid()
    for name, z in enumerate(rng.permutation(count)):
        write_slice(folder / f"IM{uid[-3:]}{name:04d}", volume[z], ORIGIN + z * GAP * NORMAL, uid, study, frame, int(z))
    return volume


def write_slice(
    path: Path, pixels: np.ndarray, position: np.ndarray, uid: str, study: str, frame: str, number: int, **extra: Any
) -> None:
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = MRImageStorage, generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    ds = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    ds.SOPClassUID, ds.SOPInstanceUID = MRImageStorage, meta.MediaStorageSOPInstanceUID
    ds.PatientID, ds.PatientName, ds.PatientBirthDate, ds.PatientSex = "p", "P^", "", ""
    ds.StudyInstanceUID, ds.SeriesInstanceUID, ds.FrameOfReferenceUID = study, uid, frame
    ds.StudyDate = ds.StudyTime = ds.AccessionNumber = ds.ReferringPhysicianName = ds.StudyID = ""
    ds.SeriesNumber, ds.InstanceNumber, ds.Modality, ds.SeriesDescription = 1, number, "MR", "short axis"
    ds.ImageOrientationPatient = [*ACROSS.tolist(), *DOWN.tolist()]
    ds.ImagePositionPatient = [f"{v:.6f}" for v in position]
    ds.PixelSpacing, ds.SliceThickness = list(SPACING), 6.0
    ds.Rows, ds.Columns = pixels.shape
    ds.SamplesPerPixel, ds.PhotometricInterpretation = 1, "MONOCHROME2"
    ds.BitsAllocated = ds.BitsStored = 16
    ds.HighBit, ds.PixelRepresentation = 15, 1
    ds.PixelData = pixels.astype("<i2").tobytes()
    for key, value in extra.items():
        setattr(ds, key, value)
    ds.save_as(path, enforce_file_format=True)


def test_a_series_is_ordered_and_placed(tmp_path: Path) -> None:
    volume = make_series(tmp_path / "s")
    assert dicom.is_series(tmp_path / "s")
    series = dicom.read_series(tmp_path / "s")
    np.testing.assert_array_equal(series.array[0], volume)
    np.testing.assert_allclose(series.geometry.spacing, (GAP, *SPACING), rtol=1e-5)
    # The voxel (column 5, row 7, slice 2) lies where DICOM says, with the first two axes turned for NIfTI.
    place = ORIGIN + 2 * GAP * NORMAL + 5 * SPACING[1] * ACROSS + 7 * SPACING[0] * DOWN
    np.testing.assert_allclose(series.geometry.affine @ [5, 7, 2, 1], [-place[0], -place[1], place[2], 1], atol=1e-3)


def test_conversion_and_rescaling(tmp_path: Path) -> None:
    volume = make_series(tmp_path / "s", count=2)
    out = tmp_path / "scan.nii.gz"
    done = CliRunner().invoke(app, ["dicom", str(tmp_path / "s"), str(out)])
    assert done.exit_code == 0, done.output
    assert "2 x 20 x 24 (Z, H, W), 8 x 1.25 x 1.5 mm" in done.output
    np.testing.assert_array_equal(read_image(out).array[0], volume)
    np.testing.assert_allclose(nib.load(out).affine, dicom.read_series(tmp_path / "s").geometry.affine, atol=1e-4)
    for words, arguments in (("scan", (tmp_path / "s", out)), ("png", (tmp_path / "s", "a.png"))):
        with pytest.raises(PclmixError, match=words):
            dicom.convert_series(*(Path(a) for a in arguments))
    pixels = np.full((4, 4), 3, np.int16)
    (tmp_path / "one").mkdir()
    write_slice(tmp_path / "one" / "a", pixels, ORIGIN, "1.2", "1.3", "1.4", 1, RescaleSlope=2, RescaleIntercept=-1)
    single = dicom.read_series(tmp_path / "one")
    assert single.array.tolist() == np.full((1, 1, 4, 4), 5.0).tolist()
    assert single.geometry.spacing[0] == pytest.approx(6.0)


def test_unsuitable_series_are_refused(tmp_path: Path) -> None:
    def attempt(words: str, folder: Path) -> None:
        with pytest.raises(PclmixError, match=words):
            dicom.read_series(folder)

    for uid in ("1.2.111", "1.2.222"):
        make_series(tmp_path / "two", uid=uid)
    attempt(r"2 series.*\n  1\.2\.111: 4 files, short axis\n  1\.2\.222: 4 files", tmp_path / "two")
    make_series(tmp_path / "cine")
    for path in sorted((tmp_path / "cine").iterdir()):
        ds = pydicom.dcmread(path)
        ds.SOPInstanceUID = generate_uid()
        ds.save_as(path.with_name(f"{path.name}b"))
    attempt("several images have one position", tmp_path / "cine")
    make_series(tmp_path / "gap", count=5)
    middle = next(p for p in (tmp_path / "gap").iterdir() if pydicom.dcmread(p).InstanceNumber == 2)
    middle.unlink()
    attempt("is a file missing", tmp_path / "gap")
    make_series(tmp_path / "sizes", uid="1.2.333")
    write_slice(tmp_path / "sizes" / "x", np.zeros((5, 5), np.int16), ORIGIN - GAP * NORMAL, "1.2.333", "1", "1", 9)
    attempt("different sizes", tmp_path / "sizes")
    make_series(tmp_path / "lost", count=2)
    for path in (tmp_path / "lost").iterdir():
        ds = pydicom.dcmread(path)
        del ds.ImagePositionPatient
        ds.save_as(path)
    attempt("has no ImagePositionPatient", tmp_path / "lost")
    (tmp_path / "none").mkdir()
    attempt("holds no DICOM", tmp_path / "none")


def test_deflated_files_are_refused_before_they_are_inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 800 kB took 2.5 GB."""
    make_series(tmp_path / "s", 1)
    (path,) = (tmp_path / "s").iterdir()
    slice_ = pydicom.dcmread(path)
    slice_.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    slice_.save_as(path)
    monkeypatch.setattr(pydicom, "dcmread", lambda *_, **__: pytest.fail("inflated"))
    with pytest.raises(PclmixError, match=rf"{path.name}: deflated DICOM is not supported"):
        dicom.read_series(tmp_path / "s")


def test_length_of_a_damaged_element_is_not_allocated(tmp_path: Path) -> None:
    """One element claims 4 GB in a file of 856 bytes."""
    shutil.copy(Path(__file__).parents[1] / "fuzz" / "corpus" / "dicom" / "found-length.dcm", tmp_path / "a.dcm")
    tracemalloc.start()
    try:
        with pytest.raises(PclmixError, match=re.escape(str(tmp_path))):
            dicom.read_series(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_prediction_from_a_series(tmp_path: Path, lively_model: Path) -> None:
    volume = make_series(tmp_path / "scan7", shape=(64, 70))
    out = tmp_path / "out"
    arguments = ["predict", str(lively_model), str(tmp_path / "scan7"), str(out), "--device", "cpu"]
    done = CliRunner().invoke(app, [*arguments, "--dicom-seg", "--slicer"])
    assert done.exit_code == 0, done.output
    labels = read_image(out / "scan7.nii.gz")
    assert labels.array.shape[1:] == volume.shape
    series = dicom.read_series(tmp_path / "scan7")
    assert not labels.geometry.same_grid(series.geometry)
    seg = highdicom.seg.segread(out / "scan7.seg.dcm")
    assert [d.SegmentLabel for d in seg.SegmentSequence] == ["RV", "Myo", "LV"]
    sources = [slice_.SOPInstanceUID for slice_ in series.slices]
    given = seg.get_pixels_by_source_instance(
        sources, combine_segments=True, ignore_spatial_locations=True, assert_missing_frames_are_empty=True
    )
    np.testing.assert_array_equal(given, labels.array[0])
    colour = seg.get_segment_description(2).RecommendedDisplayCIELabValue
    assert colour is not None
    slicer, _ = nrrd.read(str(out / "scan7.seg.nrrd"))
    np.testing.assert_array_equal(slicer.transpose(2, 1, 0), labels.array[0])
    assert "1 were there already" in CliRunner().invoke(app, [*arguments, "--dicom-seg", "--slicer"]).output


def test_prediction_from_a_list_of_series(tmp_path: Path, lively_model: Path) -> None:
    for name in ("1.2.840.7", "1.2.840.8"):
        make_series(tmp_path / name, shape=(64, 70))
    (tmp_path / "list.txt").write_text("1.2.840.7\n1.2.840.8/\n")
    arguments = ["predict", str(lively_model), str(tmp_path / "list.txt"), str(tmp_path / "out"), "--device", "cpu"]
    done = CliRunner().invoke(app, [*arguments, "--dicom-seg"])
    assert done.exit_code == 0, done.output
    found = {path.name for path in (tmp_path / "out").iterdir()} - {"prediction.json", "labels.txt"}
    assert found == {f"1.2.840.{k}.{ending}" for k in (7, 8) for ending in ("nii.gz", "seg.dcm")}


def test_two_series_are_refused(tmp_path: Path, lively_model: Path) -> None:
    for uid in ("1.2.111", "1.2.222"):
        make_series(tmp_path / "two", uid=uid)
    done = CliRunner().invoke(app, ["predict", str(lively_model), str(tmp_path / "two"), str(tmp_path / "out")])
    assert isinstance(done.exception, PclmixError)
    assert "1.2.222" in str(done.exception)
    image = tmp_path / "a.nii.gz"
    nib.save(nib.Nifti1Image(np.zeros((8, 8, 1), np.int16), np.eye(4)), image)
    done = CliRunner().invoke(app, ["predict", str(lively_model), str(image), str(tmp_path / "o"), "--dicom-seg"])
    assert "not one" in str(done.exception)


def test_slicer_opens_names_and_colours(tmp_path: Path) -> None:
    affine = np.array([[0, -1.5, 0.3, 10], [-1.2, 0, 0, -20], [0, 0.2, -8.0, 30], [0, 0, 0, 1.0]])
    header = nib.Nifti1Image(np.zeros((5, 4, 3), np.uint8), affine).header
    labels = Labels(("background", "right ventricle", "wall"), None)
    array = np.zeros((3, 4, 5), np.uint8)
    array[1, 2, 3] = 1
    write_nrrd(tmp_path / "a.seg.nrrd", array, Geometry((3, 4, 5), (8.0, 1.5, 1.2), header), labels)
    data, said = nrrd.read(str(tmp_path / "a.seg.nrrd"))
    assert data.shape == (5, 4, 3)
    assert data[3, 2, 1] == 1
    assert (said["Segment0_Name"], said["Segment0_LabelValue"], said["Segment0_Extent"]) == (
        "right ventricle", "1", "3 3 2 2 1 1"
    )  # fmt: skip
    assert said["Segment1_Extent"] == "0 -1 0 -1 0 -1", "absent"
    np.testing.assert_allclose(np.fromstring(said["Segment0_Color"], sep=" "), [0x56 / 255, 0xB4 / 255, 0xE9 / 255],
                               atol=1e-5)  # fmt: skip
    assert said["space"] == "left-posterior-superior"
    turned = np.diag([-1, -1, 1.0]) @ affine[:3]
    np.testing.assert_allclose(said["space directions"].T, turned[:, :3], atol=1e-5)
    np.testing.assert_allclose(said["space origin"], turned[:, 3], atol=1e-5)


def test_slicer_files_are_reproducible_and_names_become_ascii(tmp_path: Path) -> None:
    labels = Labels(("background", "Ventrículo  derecho", "心臓"), None)
    array = np.random.default_rng(0).integers(0, 3, (3, 4, 5))
    write_nrrd(tmp_path / "a.seg.nrrd", array, Geometry((3, 4, 5), (8.0, 1.5, 1.2)), labels)
    head = (tmp_path / "a.seg.nrrd").read_bytes().partition(b"\n\n")[0]
    assert b"\n#" not in head, "pynrrd writes the time of day as a comment"
    data, said = nrrd.read(str(tmp_path / "a.seg.nrrd"))
    np.testing.assert_array_equal(data.transpose(2, 1, 0), array)
    assert said["Segment0_Name"] == "Ventriculo derecho"
    assert said["Segment1_Name"] == r"\u5fc3\u81d3"
