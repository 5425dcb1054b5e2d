"""The survey of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from pclmix.data.dataset import IMAGES, SCRIBBLES, Dataset, write_dataset_json
from pclmix.data.preprocess import Preprocessing
from pclmix.data.survey import CASES, strokes_kept, survey
from pclmix.errors import PclmixError
from pclmix.labels import Labels

Make = Callable[..., Dataset]


def _write(path: Path, array: np.ndarray) -> None:
    nib.save(nib.Nifti1Image(array.T, np.eye(4)), path)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A dataset of volumes from images (Z, H, W) and labels with 9 where nothing is drawn."""

    def made(*pairs: tuple[np.ndarray, np.ndarray]) -> Dataset:
        root = tmp_path / "set"
        (root / IMAGES).mkdir(parents=True)
        (root / SCRIBBLES).mkdir()
        for n, (image, label) in enumerate(pairs):
            _write(root / IMAGES / f"case{n:03d}_0000.nii.gz", image)
            _write(root / SCRIBBLES / f"case{n:03d}.nii.gz", label)
        labels = Labels(("background", "a", "b"), 3)
        write_dataset_json(root, channels=["x"], labels=labels, ending=".nii.gz", cases=len(pairs))
        return Dataset.open(root)

    return made


def drawn(shape: tuple[int, int, int], **strokes: tuple[slice, slice]) -> np.ndarray:
    label = np.full(shape, 3, np.uint8)
    for k, place in strokes.items():
        label[(0, *place)] = int(k[1:])
    return label


def test_sizes_intensities_and_strokes(make: Make) -> None:
    first = np.zeros((2, 20, 30), np.int16)
    first[0, 5, 5:15] = 100
    first[1] = 1  # a slice that spans nothing of its volume
    second = np.full((4, 40, 30), 7, np.int16)
    second[:, 0, 0] = 90
    found = survey(
        make(
            (first, drawn((2, 20, 30), k1=(slice(5, 6), slice(5, 15)), k0=(slice(0, 1), slice(0, 4)))),
            (second, drawn((4, 40, 30), k1=(slice(5, 25), slice(5, 6)))),
        )
    )
    assert found.shape == (3, 30, 30)
    assert (found.smallest, found.largest) == ((20, 30), (40, 30))
    assert (found.low, found.high) == ((0.0,), (100.0,))
    assert found.dim == pytest.approx(0.25)
    assert found.drawn.tolist() == [4, 30, 0]
    assert found.cases_drawn.tolist() == [1, 2, 0]
    assert (found.extent(1), found.extent(2)) == (15.0, None)
    assert not found.hounsfield
    assert not found.pictures


def test_hounsfield_units_are_recognised(make: Make) -> None:
    image = np.linspace(-1000, 1500, 400).reshape(1, 20, 20).astype(np.int16)
    label = drawn((1, 20, 20), k1=(slice(9, 10), slice(0, 20)))
    found = survey(make((image, label)))
    assert found.hounsfield
    low, high = found.under_strokes or (0, 0)
    assert image[0, 9, 0] <= low < high <= image[0, 9, 19]


def test_survey_reads_a_limited_number_of_cases(make: Make) -> None:
    pair = (np.zeros((1, 4, 4), np.int16), drawn((1, 4, 4), k1=(slice(0, 1), slice(0, 1))))
    dataset = make(*[pair] * (CASES + 11))
    found = survey(dataset)
    assert len(found.cases) == CASES
    assert {dataset.cases[0], dataset.cases[-1]} <= set(found.cases)


def test_lost_strokes_are_listed(make: Make) -> None:
    label = drawn((1, 40, 40), k1=(slice(0, 1), slice(0, 40)))
    label[0, 0, 1] = 2
    dataset = make((np.zeros((1, 40, 40), np.int16), label))
    kept, lost = strokes_kept(dataset, dataset.cases, Preprocessing((40, 40)))
    assert (kept, lost) == (1.0, [])
    kept, lost = strokes_kept(dataset, dataset.cases, Preprocessing((1, 1)))
    assert kept < 1
    assert len(lost) == 1


def test_a_damaged_file_is_named(make: Make) -> None:
    pair = (np.zeros((1, 4, 4), np.int16), drawn((1, 4, 4), k1=(slice(0, 1), slice(0, 1))))
    dataset = make(pair, pair)
    dataset.image_paths("case001")[0].write_bytes(b"nothing")
    with pytest.raises(PclmixError, match="case001"):
        survey(dataset)
