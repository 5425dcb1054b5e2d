"""A rehearsal compiles kernels and launches none; it is tried on the phantom of a kernel, since here is no GPU."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

import pytest

from pclmix.rehearsal import launch, rehearsal


class Compiled:
    def __init__(self) -> None:
        self.loaded_by: list[str] = []

    @property
    def run(self) -> None:
        self.loaded_by.append(threading.current_thread().name)


class Kernel:
    """What launch and rehearsal know of a Triton kernel."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.warmed: list[Any] = []
        self.compiled = Compiled()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launched.append((grid, args, options))

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        self.warmed.append((grid, args, options))
        mode = Mode.active
        return self.compiled if mode is None else SimpleNamespace(result=lambda: self.compiled)


class Mode:
    """AsyncCompileMode: inside, warmup promises kernels."""

    active: Mode | None = None

    def __init__(self, pool: Executor) -> None:
        self.pool = pool

    def __enter__(self) -> None:
        Mode.active = self
        self.future: Future[int] = self.pool.submit(lambda: 1)

    def __exit__(self, *_: object) -> None:
        Mode.active = None


@pytest.fixture(params=["side by side", "an older Triton"])
def triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(AsyncCompileMode=Mode) if request.param == "side by side" else SimpleNamespace()
    monkeypatch.setitem(sys.modules, "triton", module)


def test_outside_a_rehearsal_kernels_are_launched() -> None:
    kernel = Kernel()
    launch(kernel, (3,))(1, 2, num_warps=4)
    assert kernel.launched == [((3,), (1, 2), {"num_warps": 4})]
    assert not kernel.warmed


@pytest.mark.usefixtures("triton")
def test_a_rehearsal_compiles_each_kernel_and_loads_it_once() -> None:
    kernels = [Kernel(), Kernel()]
    with rehearsal():
        for kernel in (*kernels, kernels[0]):
            launch(kernel, (2, 5))("map", num_warps=8)
    assert [len(kernel.warmed) for kernel in kernels] == [2, 1]
    assert kernels[0].warmed[0] == ((2, 5), ("map",), {"num_warps": 8})
    for kernel in kernels:
        assert not kernel.launched
        assert len(kernel.compiled.loaded_by) == 1
    launch(kernels[0], (1,))()
    assert len(kernels[0].launched) == 1


@pytest.mark.usefixtures("triton")
def test_a_failed_rehearsal_is_over() -> None:
    kernel = Kernel()
    with pytest.raises(ZeroDivisionError), rehearsal():
        raise ZeroDivisionError
    launch(kernel, (1,))()
    assert len(kernel.launched) == 1
