"""Importers keep names, intensities, types and headers, and refuse unsupported input."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from pclmix.data.check import check
from pclmix.data.dataset import Dataset
from pclmix.data.importers import IMPORTERS, Options, import_dataset
from pclmix.data.importers.wsl4mis import read_volume
from pclmix.errors import PclmixError
from pclmix.labels import IGNORE

RAW = Path(__file__).parents[2] / "../shared/acdc/raw"
CASE = "patient001_frame01"


def test_importer_names():
    assert IMPORTERS.names() == ["acdc", "folder", "wsl4mis"]


@pytest.mark.skipif(not RAW.is_dir(), reason="needs ../shared/acdc/raw, three patients of ACDC")
def test_acdc_sample_is_copied_byte_for_byte(tmp_path):
    made, notes = import_dataset("acdc", RAW, tmp_path / "out")
    assert notes == ()
    assert made.cases[:2] == ("patient001_frame01", "patient001_frame12")
    assert len(made.cases) == 6
    for case in made.cases:
        source = RAW / case.split("_")[0] / case
        for path, suffix in (
            (made.image_paths(case)[0], ""),
            (made.scribble_path(case), "_scribble"),
            (made.reference_path(case), "_gt"),
        ):
            assert path.read_bytes() == Path(f"{source}{suffix}.nii.gz").read_bytes()
    volume = made.read_image(CASE)
    assert volume.array.dtype == np.int16
    assert volume.geometry.spacing == (10.0, 1.5625, 1.5625)
    scribble, _ = made.read_scribble(CASE)
    assert set(np.unique(scribble)) == {IGNORE, 0, 1, 2, 3}
    report = check(made)
    assert report.errors == []
    assert [f.count for f in report.findings if f.kind == "sform"] == [6]
    assert {f.case: f.count for f in report.findings if f.kind == "contradiction"} == {
        "patient001_frame01": 3,
        "patient002_frame01": 10,
        "patient002_frame12": 9,
        "patient003_frame15": 3,
    }


def test_acdc_import_keeps_every_byte(acdc_tree, dataset):
    made = Dataset.open(dataset)
    for path, name in (
        (made.image_paths(CASE)[0], CASE),
        (made.scribble_path(CASE), f"{CASE}_scribble"),
        (made.reference_path(CASE), f"{CASE}_gt"),
    ):
        assert path.read_bytes() == (acdc_tree / "patient001" / f"{name}.nii.gz").read_bytes()


def test_written_dataset_follows_nnunet(dataset):
    content = json.loads((dataset / "dataset.json").read_text())
    assert content["labels"] == {"background": 0, "RV": 1, "Myo": 2, "LV": 3, "ignore": 4}
    assert content["labels"]["ignore"] == max(content["labels"].values())
    assert content["channel_names"] == {"0": "MRI"}
    assert content["file_ending"] == ".nii.gz"
    images = {p.name for p in (dataset / "imagesTr").iterdir()}
    labels = {p.name for p in (dataset / "labelsTr").iterdir()}
    assert content["numTraining"] == len(labels) == 6
    assert images == {name.replace(".nii.gz", "_0000.nii.gz") for name in labels}
    for name in labels:
        values = np.unique(np.asarray(nib.load(dataset / "labelsTr" / name).dataobj))
        assert set(values) <= set(content["labels"].values())
        image = nib.load(dataset / "imagesTr" / name.replace(".nii.gz", "_0000.nii.gz"))
        np.testing.assert_array_equal(image.affine, nib.load(dataset / "labelsTr" / name).affine)


def test_a_dataset_without_reference_and_splits_is_read_as_it_is(dataset):
    shutil.rmtree(dataset / "referenceTr")
    (dataset / "splits_final.json").unlink()
    opened = Dataset.open(dataset)
    assert [len(s.test) for s in opened.splits()] == [4, 2]
    assert check(opened).errors == []
    assert check(opened).references == 0


def test_acdc_skips_wrappers_4d_and_info(acdc_tree, tmp_path):
    official = tmp_path / "database"
    shutil.copytree(acdc_tree, official / "training")
    patient = official / "training" / "patient001"
    (patient / "Info.cfg").write_text("ED: 1\nES: 12\n")
    shutil.copyfile(patient / f"{CASE}.nii.gz", patient / "patient001_4d.nii.gz")
    shutil.copytree(acdc_tree / "patient002", official / "testing" / "patient101")
    for path in (official / "testing" / "patient101").iterdir():
        if "scribble" in path.name:
            path.unlink()
        else:
            path.rename(path.with_name(path.name.replace("patient002", "patient101")))
    (patient / f"{CASE}_gt.nii.gz").unlink()
    made, notes = import_dataset("acdc", official, tmp_path / "out")
    assert len(made.cases) == 6
    assert not made.has_reference(CASE)
    (note,) = notes
    assert note.startswith("2 cases")


def test_acdc_scribbles_and_masks_in_other_trees(acdc_tree, tmp_path):
    for kind in ("scribble", "gt"):
        for path in list(acdc_tree.rglob(f"*_{kind}.nii.gz")):
            # one tree keeps the suffix, the other has the image's name alone
            name = path.name if kind == "scribble" else path.name.replace("_gt", "")
            target = tmp_path / kind / path.parent.name / name
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
    with pytest.raises(PclmixError, match=r"--scribbles.*pclmix scribble"):
        import_dataset("acdc", acdc_tree, tmp_path / "out")
    options = Options(scribbles=tmp_path / "scribble", masks=tmp_path / "gt")
    made, _ = import_dataset("acdc", acdc_tree, tmp_path / "out", options)
    assert check(made).errors == []
    assert all(made.has_reference(case) for case in made.cases)


def test_acdc_names_the_case_without_a_scribble(acdc_tree, tmp_path):
    (acdc_tree / "patient002" / "patient002_frame12_scribble.nii.gz").unlink()
    with pytest.raises(PclmixError, match=r"patient002_frame12\.nii\.gz"):
        import_dataset("acdc", acdc_tree, tmp_path / "out")
    shutil.copytree(acdc_tree / "patient001", acdc_tree / "copy" / "patient001")
    with pytest.raises(PclmixError, match=r"copy/patient001"):
        import_dataset("acdc", acdc_tree, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_plain_nifti_among_compressed_ones_keeps_its_bytes_inside(acdc_tree, tmp_path):
    packed = acdc_tree / "patient002" / "patient002_frame01.nii.gz"
    content = gzip.decompress(packed.read_bytes())
    packed.with_suffix("").write_bytes(content)
    packed.unlink()
    made, _ = import_dataset("acdc", acdc_tree, tmp_path / "out")
    assert gzip.decompress(made.image_paths("patient002_frame01")[0].read_bytes()) == content


def write_h5(path: Path, **arrays: np.ndarray) -> None:
    import h5py

    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, compression="gzip")


def _link(file: Any, other: Path) -> None:
    import h5py

    file["image"] = h5py.ExternalLink(str(other), "x")


def _raw(file: Any, other: Path) -> None:
    file.create_dataset("image", (2, 4, 4), np.uint8, external=[(str(other), 0, 32)])


def _virtual(file: Any, other: Path) -> None:
    import h5py

    layout = h5py.VirtualLayout((2, 4, 4), np.uint8)
    layout[:] = h5py.VirtualSource(str(other), "x", (2, 4, 4))
    file.create_virtual_dataset("image", layout)


@pytest.mark.parametrize(
    ("make", "reason"), [(_link, "is a link"), (_raw, "in another file"), (_virtual, "in another file")]
)
def test_wsl4mis_reads_no_other_file(make: Any, reason: str, tmp_path: Path) -> None:
    import h5py

    other, path = tmp_path / "secret.h5", tmp_path / "case.h5"
    write_h5(other, x=np.full((2, 4, 4), 77, np.uint8))
    with h5py.File(path, "w") as file:
        make(file, other)
        file["scribble"] = np.full((2, 4, 4), 4, np.uint8)
    with h5py.File(path) as file:
        assert file["image"].shape == (2, 4, 4)  # HDF5 itself opens the other file
    with pytest.raises(PclmixError, match=rf"case\.h5: 'image' .*{reason}"):
        read_volume(path)


@pytest.mark.parametrize(
    "image",
    [
        np.full((2, 4, 4), b"a"),
        np.zeros((2, 4, 4), np.complex64),
        np.zeros((2, 4, 4), [("a", np.float32)]),
    ],
    ids=["text", "complex", "records"],
)
def test_wsl4mis_reads_numbers_only(image: np.ndarray, tmp_path: Path) -> None:
    write_h5(tmp_path / "case.h5", image=image, scribble=np.full((2, 4, 4), 4, np.uint8))
    with pytest.raises(PclmixError, match=r"case\.h5: 'image' must be an array of numbers"):
        read_volume(tmp_path / "case.h5")


def test_wsl4mis_volumes(acdc_tree, tmp_path, run):
    images = sorted(p for p in acdc_tree.rglob("*.nii.gz") if "gt" not in p.name and "scribble" not in p.name)
    source = tmp_path / "ACDC"
    for path in images:
        stem = path.name.removesuffix(".nii.gz")

        def read(suffix: str, at: Path = path, stem: str = stem) -> np.ndarray:
            return np.asarray(nib.load(at.with_name(f"{stem}{suffix}.nii.gz")).dataobj).transpose(2, 1, 0)

        arrays = {"image": (read("") / 900).astype(np.float32), "scribble": read("_scribble"), "label": read("_gt")}
        write_h5(source / "ACDC_training_volumes" / f"{stem}.h5", **arrays)
        write_h5(source / "ACDC_training_slices" / f"{stem}_slice_0.h5", image=arrays["image"][0])
    plain = run("import", "wsl4mis", source, tmp_path / "plain")
    assert plain.code == 0, plain
    assert "1 mm" in plain.err
    made = Dataset.open(tmp_path / "plain")
    assert made.read_image(CASE).geometry.spacing == (1, 1, 1)
    assert check(made).errors == []

    spaced = run("import", "wsl4mis", source, tmp_path / "spaced", "--nifti", acdc_tree)
    assert (spaced.code, "1 mm" in spaced.err) == (0, False)
    made = Dataset.open(tmp_path / "spaced")
    assert check(made).errors == []
    volume = made.read_image(CASE)
    assert volume.geometry.spacing == (8.0, 1.5, 1.5)
    assert volume.array.dtype == np.float32
    original = np.asarray(nib.load(acdc_tree / "patient001" / f"{CASE}.nii.gz").dataobj).transpose(2, 1, 0)
    np.testing.assert_array_equal(volume.array[0], (original / 900).astype(np.float32))
    np.testing.assert_array_equal(nib.load(made.image_paths(CASE)[0]).affine, nib.load(images[0]).affine)


def test_wsl4mis_refuses_invalid_files(tmp_path):
    image = np.zeros((2, 4, 5), np.float32)
    source = tmp_path / "volumes"
    for arrays, words in (
        ({"image": image}, "'scribble' is missing"),
        ({"image": image, "scribble": image[:1]}, "scribble is"),
        ({"image": image, "scribble": image + 0.5}, "fractions"),
        ({"image": image, "scribble": image + 7}, "label values 7"),
        ({"image": image * np.nan, "scribble": image}, "NaN"),
        ({"image": image[0], "scribble": image[0]}, "shape"),
    ):
        write_h5(source / "a.h5", **arrays)
        with pytest.raises(PclmixError, match=f"a.h5.*{words}"):
            import_dataset("wsl4mis", source, tmp_path / "out")
    (source / "a.h5").write_bytes(b"not HDF5")
    with pytest.raises(PclmixError, match=r"a\.h5.*HDF5"):
        import_dataset("wsl4mis", source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
