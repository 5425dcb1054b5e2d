"""The phantom is a complete, valid, repeatable dataset whose strokes agree with its masks."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from pclmix.data.dataset import Dataset, patient_of
from pclmix.errors import PclmixError
from pclmix.labels import IGNORE
from pclmix.synth.phantom import make_phantom


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = tmp_path_factory.mktemp("data") / "phantom"
    make_phantom(root, 3, seed=7)
    return Dataset.open(root)


def test_names_and_folds(phantom: Dataset) -> None:
    assert phantom.cases == tuple(f"phantom{n:03d}_frame{f:02d}" for n in (1, 2, 3) for f in (1, 2))
    assert phantom.num_training == 6
    assert phantom.labels.names == ("background", "RV", "Myo", "LV")
    splits = phantom.splits()
    assert len(splits) == 3
    for split in splits:
        assert not {patient_of(c) for c in split.train} & {patient_of(c) for c in split.test}


def test_strokes_agree_with_masks_and_every_class_is_there(phantom: Dataset) -> None:
    for case in phantom.cases:
        scribble, _ = phantom.read_scribble(case)
        mask, _ = phantom.read_reference(case)
        assert ((scribble == mask) | (scribble == IGNORE)).all()
        assert set(np.unique(mask)) == {0, 1, 2, 3}
        assert set(np.unique(scribble)) == {IGNORE, 0, 1, 2, 3}
        assert (scribble == IGNORE).mean() > 0.95


def test_geometry_is_consistent(phantom: Dataset) -> None:
    for case in phantom.cases:
        volume = phantom.read_image(case)
        _, other = phantom.read_scribble(case)
        _, reference = phantom.read_reference(case)
        assert volume.geometry.same_grid(other) == ""
        assert volume.geometry.same_grid(reference) == ""
        z, y, x = volume.geometry.spacing
        assert 8 <= z <= 10
        assert 1.2 <= y == x <= 1.8
        assert volume.geometry.sform_spacing == pytest.approx((z, y, x), rel=1e-5)
        header = nib.load(phantom.image_paths(case)[0]).header
        assert header.get_xyzt_units()[0] == "mm"
        assert header.get_data_dtype() == np.int16
        assert volume.array.min() >= 0


def test_the_second_frame_is_contracted(phantom: Dataset) -> None:
    for patient in ("phantom001", "phantom002", "phantom003"):
        full, _ = phantom.read_reference(f"{patient}_frame01")
        small, _ = phantom.read_reference(f"{patient}_frame02")
        assert (small == 3).sum() < 0.75 * (full == 3).sum()


def test_the_same_seed_gives_the_same_set(phantom: Dataset, tmp_path: Path) -> None:
    make_phantom(tmp_path / "again", 1, seed=7)
    make_phantom(tmp_path / "other", 1, seed=8)
    again, other = Dataset.open(tmp_path / "again"), Dataset.open(tmp_path / "other")
    for case in again.cases:
        assert np.array_equal(again.read_image(case).array, phantom.read_image(case).array)
        assert np.array_equal(again.read_scribble(case)[0], phantom.read_scribble(case)[0])
        assert again.read_image(case).array.shape != other.read_image(case).array.shape or not np.array_equal(
            again.read_image(case).array, other.read_image(case).array
        )


def test_refusals_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(PclmixError, match="1 to 999"):
        make_phantom(tmp_path / "none", 0)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(PclmixError, match="there"):
        make_phantom(tmp_path / "there", 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there"]
