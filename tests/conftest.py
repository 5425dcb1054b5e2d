"""What several tests need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
    """A block in which everything that would make the host wait for a GPU fails, on any device."""
    return NoSync


@pytest.fixture(scope="session")
def phantom_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three phantom patients, two frames each, in three folds. Not to be written to."""
    from pclmix.data.phantom import make_phantom

    root = tmp_path_factory.mktemp("phantom") / "set"
    make_phantom(root, 3)
    return root


@pytest.fixture(scope="session")
def tiny_run(phantom_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """PCLMix by recipe tiny, three iterations on fold 1 of the phantom. Not to be written to."""
    from pclmix.engine.start import run_training

    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PCLMIX_CACHE", str(folder / "cache"))
        overrides = ["engine.iterations=3", "optim.lr=0.3"]
        assert run_training(phantom_dataset, folder / "run", recipe="tiny", overrides=overrides, fold=1, device="cpu")
        yield folder / "run"


@pytest.fixture(scope="session")
def lively_model(tiny_run: Path, phantom_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `tiny_run` with its head's bias moved so that every class is predicted somewhere.

    After three iterations everything is background, and a test of labels would hold for any code at all.
    """
    from pclmix.data.volume import read_image
    from pclmix.engine.checkpoint import load_checkpoint, trained_state
    from pclmix.predict import load

    image = read_image(phantom_dataset / "imagesTr" / "phantom001_frame01_0000.nii.gz").array
    predictor = load(tiny_run, device="cpu")
    mean = torch.from_numpy(predictor.logits(image).mean((0, 2, 3)))
    content = load_checkpoint(tiny_run / "last.ckpt")
    state = trained_state(content)
    state["net.decoder.head.bias"] = state["net.decoder.head.bias"] - mean
    path = tmp_path_factory.mktemp("lively") / "lively.ckpt"
    torch.save({**content, "method": state, "average": None}, path)
    assert set(load(path, device="cpu").predict(image).ravel().tolist()) == {0, 1, 2, 3}
    return path
