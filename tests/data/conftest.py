"""Small datasets written by hand, and the command line run in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest


def nifti(path: Path, array: np.ndarray, spacing: tuple[float, ...] = (1.5, 1.5, 8.0)) -> Path:
    """Write stored order (X, Y, Z) with an affine and a pixdim that agree."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, np.diag([*spacing, 1.0])), path)
    return path


def scribble_of(mask: np.ndarray, ignore: int) -> np.ndarray:
    """One row of every slice drawn in full, as the mask has it; nothing elsewhere."""
    out = np.full(mask.shape, ignore, dtype=np.uint8)
    out[:, 4] = mask[:, 4]
    return out


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`pclmix ARGS...` as the shell would run it: exit code, stdout, stderr."""
    from pclmix.cli import main

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["pclmix", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def acdc_tree(tmp_path: Path) -> Path:
    """Three patients, two frames each, as ACDC is distributed: int16 images, masks, scribbles with 4 for nothing."""
    rng = np.random.default_rng(0)
    root = tmp_path / "tree"
    for patient in (1, 2, 30):
        for frame in (1, 12):
            case = f"patient{patient:03d}_frame{frame:02d}"
            folder = root / f"patient{patient:03d}"
            mask = np.zeros((10, 12, 3), dtype=np.uint8)
            mask[2:4], mask[4:6], mask[6:8] = 1, 2, 3
            nifti(folder / f"{case}.nii.gz", rng.integers(0, 900, mask.shape).astype(np.int16))
            nifti(folder / f"{case}_gt.nii.gz", mask)
            nifti(folder / f"{case}_scribble.nii.gz", scribble_of(mask, 4))
    return root


@pytest.fixture
def dataset(tmp_path: Path, acdc_tree: Path) -> Path:
    """A sound dataset of six cases in three patients, with references and three folds."""
    from pclmix.data.dataset import Dataset, write_splits
    from pclmix.data.importers import import_dataset
    from pclmix.data.splits import patient_splits

    root = tmp_path / "dataset"
    import_dataset("acdc", acdc_tree, root)
    write_splits(root, patient_splits(Dataset.open(root).cases, 3))
    return root


@pytest.fixture
def edit_json() -> Callable[[Path, Callable[[dict], object]], None]:
    def edit(path: Path, change: Callable[[dict], object]) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return edit
