"""Launch Triton kernels, or compile all kernels of a piece of code ahead.

Triton compiles a kernel when it is first launched. `compile_ahead` runs code without launching its kernels: they are
only compiled for the arguments that they are called with, several at a time. Results inside are whatever memory held,
so code inside must not branch on values, and the caller restores what it changes. A training step that can be captured
as a CUDA graph is such code.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

#: Kernels, or futures of kernels, that `compile_ahead` has met so far; None outside of it.
_compiling: list[Any] | None = None


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """kernel[grid], to be called with the kernel's arguments; inside `compile_ahead` it is only compiled for them."""
    compiling = _compiling
    if compiling is None:
        start: Callable[..., None] = kernel[grid]
        return start

    def compile_only(*args: Any, **options: Any) -> None:
        compiling.append(kernel.warmup(*args, grid=grid, **options))

    return compile_only


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Compile the kernels launched inside, in parallel; they are ready when the block ends."""
    global _compiling
    _compiling = []
    try:
        with ThreadPoolExecutor(os.cpu_count(), initializer=_start_thread, initargs=_device()) as pool:
            # Triton's mode belongs to one thread, so the backward pass must stay in it.
            with _asynchronous(pool), torch.autograd.set_multithreading_enabled(False):
                yield
            kernels = {id(kernel): kernel for kernel in map(_resolve, _compiling)}
            list(pool.map(_load, kernels.values()))
    finally:
        _compiling = None


def _asynchronous(pool: Executor) -> AbstractContextManager[Any]:
    """Triton's mode in which compiling returns a future; versions without it compile one kernel after the other.

    The mode ignores errors, since it stays active for good when it raises one on exit; `_resolve` raises them.
    """
    import triton

    if not hasattr(triton, "AsyncCompileMode"):
        return nullcontext()
    mode: AbstractContextManager[Any] = triton.AsyncCompileMode(pool, ignore_errors=True)
    return mode


def _device() -> tuple[int, ...]:
    return (torch.cuda.current_device(),) if torch.cuda.is_available() else ()


def _start_thread(*device: int) -> None:
    """Set this thread's device, which is 0 by default, and keep Ctrl-C from the compilers that it starts."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if device:
        torch.cuda.set_device(*device)


def _resolve(kernel: Any) -> Any:
    """Resolve the future of a kernel; re-raise its compile error."""
    return kernel.result() if hasattr(kernel, "result") else kernel


def _load(kernel: Any) -> None:
    """Load a compiled kernel to the device and build its launcher, which is compiled as well."""
    kernel.run  # noqa: B018  (a property that does so on first access)
