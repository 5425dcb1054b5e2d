from __future__ import annotations

import pytest

from pclmix.errors import PclmixError
from pclmix.methods.base import METHODS, Task, build_params, find_method, load_all

ROWS = {
    "full",
    "pce",
    "rw",
    "em",
    "mloss",
    "rloss",
    "ustm",
    "s2l",
    "dmpls",
    "scnet",
    "trimix",
    "cyclemix",
    "scribblevs",
    "pclmix",
}


def test_registers_every_method() -> None:
    load_all()
    assert set(METHODS.names()) >= ROWS


def test_unknown_method_suggests_the_nearest() -> None:
    with pytest.raises(PclmixError, match="'trimix'"):
        find_method("trimx")


def test_unknown_parameter_suggests_the_nearest() -> None:
    with pytest.raises(PclmixError, match=r"weigth.*'weight'"):
        build_params(find_method("em"), {"weigth": 1.0})


def test_pclmix_refuses_unsuitable_networks() -> None:
    method = find_method("pclmix")
    with pytest.raises(PclmixError, match=r"net=.*resnet"):
        method(Task("unet", 1, 4, (64, 64)), build_params(method, {}))
