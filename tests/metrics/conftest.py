"""Predictions, references and a dataset of made label maps."""

import numpy as np
import pytest
from made import CASES, LABELS, save, truth

from pclmix.data.dataset import Split, write_dataset_json, write_splits


@pytest.fixture
def masks(tmp_path):
    """(predictions, references): predictions shifted by a pixel."""
    for i, case in enumerate(CASES):
        save(tmp_path / "ref", case, truth(i))
        save(tmp_path / "pred", case, np.roll(truth(i), 1, axis=2))
    return tmp_path / "pred", tmp_path / "ref"


@pytest.fixture
def dataset(tmp_path, masks):
    root = tmp_path / "set"
    (root / "labelsTr").mkdir(parents=True)
    for i, case in enumerate(CASES):
        save(root / "referenceTr", case, truth(i))
        save(root / "imagesTr", f"{case}_0000", truth(i))
    write_dataset_json(root, channels=["MRI"], labels=LABELS, ending=".nii.gz", cases=len(CASES))
    write_splits(root, [Split(CASES[2:], CASES[:2]), Split(CASES[:2], CASES[2:])])
    return root
