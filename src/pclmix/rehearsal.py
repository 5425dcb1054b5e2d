"""Triton compiles a kernel when it is first launched. A rehearsal compiles all kernels of a piece of code at once.

Inside, kernels are not launched: code that calls them runs on with what happened to be in memory, which is enough to
learn the types and sizes it calls them with. So nothing inside may decide by values, and what it changes must be put
back; a training step that can be captured as a graph is such code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
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
    import triton

    _rehearsed = []
    try:
        with ThreadPoolExecutor(os.cpu_count(), initializer=_on_device, initargs=_device()) as pool:
            # Until it ends the mode hands out promises of kernels. Older versions compile them one after the other.
            side_by_side = triton.AsyncCompileMode(pool) if hasattr(triton, "AsyncCompileMode") else nullcontext()
            # The mode is that of one thread: a backward pass must not go to another.
            with side_by_side, torch.autograd.set_multithreading_enabled(False):
                yield
            kernels = {id(kernel): kernel for kernel in map(_kept, _rehearsed)}
            list(pool.map(_load, kernels.values()))
    finally:
        _rehearsed = None


def _device() -> tuple[int, ...]:
    return (torch.cuda.current_device(),) if torch.cuda.is_available() else ()


def _on_device(*device: int) -> None:
    """A thread begins on the first device, whatever that of its maker is."""
    if device:
        torch.cuda.set_device(*device)


def _kept(kernel: Any) -> Any:
    return kernel.result() if hasattr(kernel, "result") else kernel


def _load(kernel: Any) -> None:
    """Bring a compiled kernel to the device and build its launcher, which is compiled, too."""
    kernel.run  # noqa: B018  (a property that does so when first asked)
