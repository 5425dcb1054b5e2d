"""Optional formats need extras; without the package the message names the extra."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from pclmix.data.importers.wsl4mis import read_volume
from pclmix.errors import PclmixError, install_hint, need_extra
from pclmix.io.dicom import read_series
from pclmix.io.volume import Geometry, read_image, write_labels

GEOMETRY = Geometry((1, 2, 2), (1.0, 1.0, 1.0))
NEEDS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "read tiff": ("tifffile", "tiff", lambda folder: read_image(folder / "a.tif")),
    "write tiff": ("tifffile", "tiff", lambda folder: write_labels(folder / "b.tif", np.ones((1, 2, 2)), GEOMETRY)),
    "read hdf5": ("h5py", "hdf5", lambda folder: read_volume(folder / "a.h5")),
    "read dicom": ("pydicom", "dicom", read_series),
}


@pytest.mark.parametrize("what", sorted(NEEDS))
def test_a_missing_package_is_named_with_its_extra(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, extra, use = NEEDS[what]
    for name in ("a.tif", "a.h5"):
        (tmp_path / name).write_bytes(b"II*\0")
    monkeypatch.setitem(sys.modules, package, None)  # import raises ImportError
    with pytest.raises(PclmixError) as caught:
        use(tmp_path)
    message = str(caught.value)
    assert package in message
    assert f"pip install '.[{extra}]'" in message
    assert str(tmp_path) in message
    assert not (tmp_path / "b.tif").exists()


def test_every_extra_exists_and_dev_has_them_all() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {extra for _, extra, _ in NEEDS.values()} | {"tensorboard"} <= set(extras)
    (own,) = [entry for entry in extras["dev"] if entry.startswith("pclmix[")]
    inside = set(own.removeprefix("pclmix[").removesuffix("]").split(","))
    assert inside == set(extras) - {"dev", "docs"}  # `make docs` installs its own
    everywhere = " ".join(project["dependencies"])
    assert not [name for name in ("h5py", "tifffile", "tensorboard") if name in everywhere]


def test_the_hint_names_every_package_of_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who installed a wheel has no clone; who has pclmix-runtime has no pclmix."""
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra in set(extras) - {"dev", "docs"}:
        hint = install_hint(extra, "nothing")
        assert f"pip install '.[{extra}]' in a clone" in hint
        by_name = hint.rpartition("pip install ")[2].split()
        assert sorted(by_name) == sorted(entry.partition(">")[0] for entry in extras[extra])

    def not_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_installed)
    assert install_hint("tiff", "tifffile") == "pip install tifffile"


def test_a_package_that_is_there_is_returned() -> None:
    assert need_extra("importlib", "none", "nothing") is importlib
