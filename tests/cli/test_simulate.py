"""`pclmix phantom` and `pclmix scribble` as a user calls them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from pclmix.cli import main
from pclmix.data.dataset import Dataset
from pclmix.io.files import read_json, write_json
from pclmix.labels import IGNORE


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["pclmix", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli") / "phantom"
    with pytest.MonkeyPatch.context() as patch:
        assert run(patch, "phantom", root, "--cases", 2, "--seed", 3) == 0
    return root


def test_a_dataset_gives_a_dataset(phantom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "points"
    assert run(monkeypatch, "scribble", phantom, out, "--kind", "points", "--seed", 1) == 0
    before, after = Dataset.open(phantom), Dataset.open(out)
    assert after.cases == before.cases
    assert after.labels == before.labels
    assert after.splits() == before.splits()
    for case in after.cases:
        assert np.array_equal(after.read_image(case).array, before.read_image(case).array)
        assert np.array_equal(after.read_reference(case)[0], before.read_reference(case)[0])
        drawn, geometry = after.read_scribble(case)
        assert geometry.same_grid(after.read_image(case).geometry) == ""
        assert (drawn >= 0).sum() < (before.read_scribble(case)[0] >= 0).sum()


def test_a_fully_annotated_dataset_gains_an_ignore_label(
    phantom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = tmp_path / "dense"
    shutil.copytree(phantom, dense)
    shutil.rmtree(dense / "labelsTr")
    (dense / "referenceTr").rename(dense / "labelsTr")
    content = read_json(dense / "dataset.json")
    del content["labels"]["ignore"]
    write_json(dense / "dataset.json", content)
    assert run(monkeypatch, "scribble", dense, tmp_path / "out") == 0
    made = Dataset.open(tmp_path / "out")
    assert made.labels.ignore == 4
    assert all(made.has_reference(case) for case in made.cases)


def test_cases_without_a_mask_are_left_out(phantom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = tmp_path / "some"
    shutil.copytree(phantom, some)
    (some / "referenceTr" / "phantom001_frame01.nii.gz").unlink()
    assert run(monkeypatch, "scribble", some, tmp_path / "out") == 0
    made = Dataset.open(tmp_path / "out")
    assert len(made.cases) == made.num_training == 3
    assert made.splits()[0].test == ("phantom001_frame02",)


def test_a_tree_of_masks_gives_a_tree_of_scribbles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = np.zeros((40, 30, 2), np.float32)
    mask[10:30, 8:22] = 2
    affine = np.diag([1.5, 1.5, 9.0, 1.0])
    (tmp_path / "tree" / "p1").mkdir(parents=True)
    image = nib.Nifti1Image(np.full(mask.shape, 700, np.int16), np.eye(4))
    image.header.set_zooms((1.5, 1.5, 9.0))
    nib.save(image, tmp_path / "tree" / "p1" / "p1_frame01.nii.gz")
    nib.save(nib.Nifti1Image(mask, affine), tmp_path / "tree" / "p1" / "p1_frame01_gt.nii.gz")
    assert run(monkeypatch, "scribble", tmp_path / "tree", tmp_path / "out", "--width", 3) == 0
    made = [p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert made == ["p1/p1_frame01_scribble.nii.gz"]
    drawn = nib.load(tmp_path / "out" / made[0])
    assert np.array_equal(drawn.affine, affine)
    values = np.asarray(drawn.dataobj)
    assert set(np.unique(values)) == {0, 2, 3}
    assert ((values == mask) | (values == 3)).all()


def test_invalid_input_gives_one_message_and_no_files(
    phantom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    bare = tmp_path / "bare"
    shutil.copytree(phantom, bare)
    shutil.rmtree(bare / "referenceTr")
    torn = tmp_path / "torn"
    shutil.copytree(phantom / "referenceTr", torn)
    file = torn / "phantom001_frame01.nii.gz"
    file.write_bytes(file.read_bytes()[:300])
    before = sorted(tmp_path.iterdir())
    for arguments, named in [
        ((tmp_path / "nowhere", tmp_path / "out"), tmp_path / "nowhere"),
        ((file, tmp_path / "out"), file),
        ((empty, tmp_path / "out"), empty),
        ((bare, tmp_path / "out"), bare / "referenceTr"),
        ((torn, tmp_path / "out"), file),
        ((phantom / "imagesTr", tmp_path / "out"), phantom / "imagesTr" / "phantom001_frame01_0000.nii.gz"),
        ((phantom, bare), bare),
        ((phantom, tmp_path / "out", "--kind", "pionts"), "'points'"),
        ((phantom, tmp_path / "out", "--amount", "-1"), "amount"),
    ]:
        assert run(monkeypatch, "scribble", *arguments) == 2
        assert str(named) in capsys.readouterr().err.replace("\n", "")
        assert sorted(tmp_path.iterdir()) == before
    assert run(monkeypatch, "phantom", bare) == 2
    assert str(bare) in capsys.readouterr().err


def test_nothing_is_drawn_outside_its_class(phantom: Path) -> None:
    dataset = Dataset.open(phantom)
    for case in dataset.cases:
        drawn, mask = dataset.read_scribble(case)[0], dataset.read_reference(case)[0]
        assert ((drawn == mask) | (drawn == IGNORE)).all()


def test_next_command_quotes_paths_with_spaces(
    phantom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spaced = tmp_path / "my masks"
    shutil.copytree(phantom / "referenceTr", spaced)
    assert run(monkeypatch, "scribble", spaced, tmp_path / "my strokes") == 0
    assert f"--scribbles '{tmp_path / 'my strokes'}' --masks '{spaced}'" in capsys.readouterr().out
    assert run(monkeypatch, "scribble", phantom, tmp_path / "my set") == 0
    assert f"pclmix check '{tmp_path / 'my set'}'" in capsys.readouterr().out
