"""compile_ahead compiles kernels in parallel and launches none: with mock kernels and a mock of Triton's mode."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pclmix.kernels import compile_ahead, launch


class Compiled:
    """Records the thread that loaded it to the device, and whether that thread blocks Ctrl-C."""

    def __init__(self) -> None:
        self.loaded_by: list[threading.Thread] = []
        self.blocked: set[signal.Signals] = set()

    @property
    def run(self) -> None:
        self.loaded_by.append(threading.current_thread())
        self.blocked = set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))  # type: ignore[arg-type]


class Promise:
    def __init__(self, future: Future[Compiled]) -> None:
        self.result = future.result


class Mode:
    """As Triton's AsyncCompileMode: one at a time; an error that it does not ignore leaves it on."""

    active: Mode | None = None
    entered = 0

    def __init__(self, pool: Executor, *, ignore_errors: bool = False) -> None:
        self.pool, self.ignore_errors, self.futures = pool, ignore_errors, list[Future[Compiled]]()

    def __enter__(self) -> None:
        assert Mode.active is None, "Another AsyncCompileMode is already active"
        Mode.active, Mode.entered = self, Mode.entered + 1

    def __exit__(self, *_: object) -> None:
        for future in wait(self.futures).done:
            if not self.ignore_errors:
                future.result()
        Mode.active = None


class Kernel:
    """What launch and compile_ahead use of a Triton kernel; `barrier` is waited at while it is compiled."""

    def __init__(self, barrier: threading.Barrier | None = None, error: Exception | None = None) -> None:
        self.launched: list[Any] = []
        self.warmed: list[Any] = []
        self.compiled, self.barrier, self.error = Compiled(), barrier, error

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.launched.append((grid, args, options))

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        self.warmed.append((grid, args, options))
        mode = Mode.active
        if mode is None:
            return self.compile()
        mode.futures.append(mode.pool.submit(self.compile))
        return Promise(mode.futures[-1])

    def compile(self) -> Compiled:
        if self.barrier is not None:
            self.barrier.wait(timeout=20)
        if self.error is not None:
            raise self.error
        return self.compiled


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(AsyncCompileMode=Mode)
    monkeypatch.setitem(sys.modules, "triton", module)
    monkeypatch.setattr(Mode, "active", None)
    monkeypatch.setattr(Mode, "entered", 0)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    return module


def test_launches_outside_compile_ahead() -> None:
    kernel = Kernel()
    launch(kernel, (3,))(1, 2, num_warps=4)
    assert kernel.launched == [((3,), (1, 2), {"num_warps": 4})]
    assert not kernel.warmed


@pytest.mark.parametrize("older", [False, True])
def test_compiles_each_kernel_and_loads_it_once(triton: SimpleNamespace, older: bool) -> None:
    if older:
        del triton.AsyncCompileMode
    kernels = [Kernel(), Kernel()]
    with compile_ahead():
        for kernel in (*kernels, kernels[0]):
            launch(kernel, (2, 5))("map", num_warps=8)
    assert Mode.entered == (0 if older else 1)
    assert [len(kernel.warmed) for kernel in kernels] == [2, 1]
    assert kernels[0].warmed[0] == ((2, 5), ("map",), {"num_warps": 8})
    for kernel in kernels:
        assert not kernel.launched
        assert len(kernel.compiled.loaded_by) == 1
        assert kernel.compiled.loaded_by[0] is not threading.main_thread()
        assert signal.SIGINT in kernel.compiled.blocked  # only the main thread handles Ctrl-C
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # type: ignore[arg-type]
    launch(kernels[0], (1,))()
    assert len(kernels[0].launched) == 1


@pytest.mark.usefixtures("triton")
def test_compiles_in_parallel() -> None:
    barrier = threading.Barrier(3)  # passed only if two compile at once
    with compile_ahead():
        for _ in range(3):
            launch(Kernel(barrier), (1,))()


@pytest.mark.usefixtures("triton")
def test_backward_stays_in_the_main_thread() -> None:
    threads = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            threads.append((threading.current_thread(), torch.autograd.is_multithreading_enabled()))
            return gradient

    with compile_ahead():
        Noted.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert threads == [(threading.main_thread(), False)]
    assert torch.autograd.is_multithreading_enabled()


@pytest.mark.usefixtures("triton")
def test_raises_compile_errors_and_leaves_the_mode() -> None:
    with pytest.raises(ArithmeticError, match="no such type"), compile_ahead():
        launch(Kernel(error=ArithmeticError("no such type")), (1,))()
    assert Mode.active is None
    kernel = Kernel()
    with compile_ahead():
        launch(kernel, (1,))()
    assert len(kernel.compiled.loaded_by) == 1


@pytest.mark.usefixtures("triton")
def test_interrupt_leaves_the_mode() -> None:
    """Whether or not the kernels were compiled."""
    kernel = Kernel(error=ArithmeticError("killed"))

    def interrupted() -> None:
        launch(kernel, (1,))()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), compile_ahead():
        interrupted()
    assert Mode.active is None
    launch(kernel, (1,))()
    assert len(kernel.launched) == 1
