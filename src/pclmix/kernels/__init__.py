"""Fused operations for training on a GPU: where they are used, launched and compiled ahead.

`ops` is the interface: each function is defined in plain torch and runs Triton kernels where they are `usable`, on bf16
tensors on the current CUDA device. The other modules hold the kernels with their autograd functions and import Triton.
Block sizes are fixed (nothing is tuned during training, so that a step can be captured as a CUDA graph); sums are in
float32 and in a fixed order (atomics only count).

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
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

OPERATIONS = ("attention", "batchnorm", "fork", "layernorm", "linear", "logits", "losses", "squared_norm", "upsample")

_switched_off: frozenset[str] = frozenset()


def usable(operation: str, *tensors: Tensor | None, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the kernels of `operation` support these tensors (device and type) and Triton is installed."""
    fit = all(_fits(x, dtype) for x in tensors if x is not None)
    return fit and operation not in _switched_off and installed()


def _fits(x: Tensor, dtype: torch.dtype) -> bool:
    return x.is_cuda and x.dtype == dtype and x.device.index == torch.cuda.current_device()


@cache
def installed() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def channels_last(*maps: Tensor | None) -> bool:
    """Whether the (B, C, H, W) maps are channels-last in memory."""
    return all(x.is_contiguous(memory_format=torch.channels_last) for x in maps if x is not None)


def switch_off() -> None:
    """Use plain torch in this process from here on."""
    global _switched_off
    _switched_off = frozenset(OPERATIONS)


@contextmanager
def plain(*operations: str) -> Iterator[None]:
    """Use plain torch inside, for these operations or all, for comparison and timing."""
    global _switched_off
    before, _switched_off = _switched_off, _switched_off | frozenset(operations or OPERATIONS)
    try:
        yield
    finally:
        _switched_off = before


#: Kernels, or futures of kernels, collected by `compile_ahead`; None outside of it.
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
            # Triton's mode is thread-local, so the backward pass must run in this thread.
            with _asynchronous(pool), torch.autograd.set_multithreading_enabled(False):
                yield
            kernels = {id(kernel): kernel for kernel in map(_resolve, _compiling)}
            list(pool.map(_load, kernels.values()))
    finally:
        _compiling = None


def _asynchronous(pool: Executor) -> AbstractContextManager[Any]:
    """Triton's asynchronous compilation mode; versions without it compile sequentially.

    The mode ignores errors, since it would stay active if it raised on exit; `_resolve` raises them.
    """
    import triton

    if not hasattr(triton, "AsyncCompileMode"):
        return nullcontext()
    mode: AbstractContextManager[Any] = triton.AsyncCompileMode(pool, ignore_errors=True)
    return mode


def _device() -> tuple[int, ...]:
    return (torch.cuda.current_device(),) if torch.cuda.is_available() else ()


def _start_thread(*device: int) -> None:
    """Set this thread's device, which is 0 by default, and shield its compilers from Ctrl-C."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if device:
        torch.cuda.set_device(*device)


def _resolve(kernel: Any) -> Any:
    """Resolve the future of a kernel; re-raise its compile error."""
    return kernel.result() if hasattr(kernel, "result") else kernel


def _load(kernel: Any) -> None:
    """Load a compiled kernel to the device and compile its launcher."""
    kernel.run  # noqa: B018  (a property that does so on first access)
