"""Shared fixtures."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    # Triton reads this when it is imported; kernels run on the CPU inside `interpreter.interpreted()` only.
    os.environ["TRITON_INTERPRET"] = "1"

#: Operations whose result's shape or value the host must wait for, and constants that must be copied to the device.
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "equal",
    "is_nonzero",
    "lift_fresh",
}


class HostWaitsError(AssertionError):
    """An operation that makes the host wait for the device."""


class NoSync(TorchDispatchMode):
    """Raises on `.item()`, `if tensor`, `.nonzero()`, boolean indexing, `unique`, `torch.tensor(...)` and the like."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING or (name == "repeat_interleave" and func._overloadname == "Tensor"):
            raise HostWaitsError(str(func))
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks:
                raise HostWaitsError(f"{func} with a boolean index")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_sync() -> Callable[[], AbstractContextManager[Any]]:
    """Context in which operations that would synchronise with a GPU fail, on any device."""
    return NoSync


@pytest.fixture(scope="session")
def phantom_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three phantom patients, two frames each, in three folds. Not to be written to."""
    from pclmix.synth.phantom import make_phantom

    root = tmp_path_factory.mktemp("phantom") / "set"
    make_phantom(root, 3)
    return root


@pytest.fixture(scope="session")
def tiny_run(phantom_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """PCLMix by recipe tiny, three iterations on fold 1 of the phantom. Not to be written to."""
    from pclmix.training.request import TrainRequest
    from pclmix.training.start import run_training

    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PCLMIX_CACHE", str(folder / "cache"))
        overrides = ["engine.iterations=3", "optim.lr=0.3"]
        request = TrainRequest(
            phantom_dataset, folder / "run", recipe="tiny", overrides=overrides, fold=1, device="cpu"
        )
        assert run_training(request)
        yield folder / "run"


@pytest.fixture(scope="session")
def lively_model(tiny_run: Path, phantom_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `tiny_run` with its head's bias moved so that every class is predicted somewhere.

    After three iterations everything is background, which would make tests of labels meaningless.
    """
    from pclmix.inference import load
    from pclmix.io.volume import read_image
    from pclmix.training.checkpoint import load_checkpoint, trained_state

    image = read_image(phantom_dataset / "imagesTr" / "phantom001_frame01_0000.nii.gz").array
    predictor = load(tiny_run, device="cpu")
    mean = torch.from_numpy(predictor.logits(image).mean((0, 2, 3)))
    checkpoint = load_checkpoint(tiny_run / "last.ckpt")
    state = trained_state(checkpoint)
    state["net.decoder.head.bias"] = state["net.decoder.head.bias"] - mean
    path = tmp_path_factory.mktemp("lively") / "lively.ckpt"
    torch.save({**checkpoint.to_plain(), "method": state, "average": None}, path)
    assert set(load(path, device="cpu").predict(image).ravel().tolist()) == {0, 1, 2, 3}
    return path


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
    from pclmix.data.dataset import Dataset, patient_splits, write_splits
    from pclmix.data.importers import import_dataset

    root = tmp_path / "dataset"
    import_dataset("acdc", acdc_tree, root)
    write_splits(root, patient_splits(Dataset.open(root).cases, 3))
    content = json.loads((root / "dataset.json").read_text())
    del content["habits"]  # ACDC's, and these strokes are rows
    (root / "dataset.json").write_text(json.dumps(content))
    return root


@pytest.fixture
def edit_json() -> Callable[[Path, Callable[[dict], object]], None]:
    def edit(path: Path, change: Callable[[dict], object]) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return edit
