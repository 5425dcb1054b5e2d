"""Triton compiles a kernel when it is first launched. A rehearsal compiles all kernels of a piece of code at once.

Inside, kernels are not launched: code that calls them runs on with what happened to be in memory, which is enough to
learn the types and sizes it calls them with. So nothing inside may decide by values, and what it changes must be put
back; a training step that can be captured as a graph is such code.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

#: Compiled or being compiled, while there is a rehearsal.
_rehearsed: list[Any] | None = None


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """kernel[grid], to be called with the kernel's arguments; in a rehearsal it is only compiled for them."""
    rehearsed = _rehearsed
    if rehearsed is None:
        start: Callable[..., None] = kernel[grid]
        return start

    def compile_only(*args: Any, **options: Any) -> None:
        rehearsed.append(kernel.warmup(*args, grid=grid, **options))

    return compile_only


@contextmanager
def rehearsal() -> Iterator[None]:
    """Kernels that are launched inside are compiled instead, side by side, and ready when it ends."""
    global _rehearsed
    _rehearsed = []
    try:
        with ThreadPoolExecutor(os.cpu_count(), initializer=_begin_thread, initargs=_device()) as pool:
            # The mode is that of one thread: a backward pass must not go to another.
            with _side_by_side(pool), torch.autograd.set_multithreading_enabled(False):
                yield
            kernels = {id(kernel): kernel for kernel in map(_kept, _rehearsed)}
            list(pool.map(_load, kernels.values()))
    finally:
        _rehearsed = None


def _side_by_side(pool: Executor) -> AbstractContextManager[Any]:
    """Inside, Triton hands out promises of kernels; older versions compile them one after the other.

    It ignores errors, since it stays on for good where one is raised while it ends; `_kept` raises them afterwards.
    """
    import triton

    if not hasattr(triton, "AsyncCompileMode"):
        return nullcontext()
    mode: AbstractContextManager[Any] = triton.AsyncCompileMode(pool, ignore_errors=True)
    return mode


def _device() -> tuple[int, ...]:
    return (torch.cuda.current_device(),) if torch.cuda.is_available() else ()


def _begin_thread(*device: int) -> None:
    """A thread begins on the first device, whatever that of its maker is. Ctrl-C is not for the compilers it starts."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if device:
        torch.cuda.set_device(*device)


def _kept(kernel: Any) -> Any:
    """A promise kept, or the error that it ended with."""
    return kernel.result() if hasattr(kernel, "result") else kernel


def _load(kernel: Any) -> None:
    """Bring a compiled kernel to the device and build its launcher, which is compiled, too."""
    kernel.run  # noqa: B018  (a property that does so when first asked)
