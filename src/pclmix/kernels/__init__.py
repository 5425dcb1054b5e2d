"""Fused operations for training on a GPU.

`ops` is the interface: each function is defined in plain torch and runs Triton kernels where they are `usable`, on bf16
tensors on the current CUDA device. The other modules hold the kernels with their autograd functions and import Triton.
Block sizes are fixed (nothing is tuned during training, so that a step can be captured as a CUDA graph); sums are in
float32 and in a fixed order (atomics only count).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

OPERATIONS = ("attention", "batchnorm", "fork", "layernorm", "linear", "logits", "losses", "squared_norm", "upsample")

_switched_off: frozenset[str] = frozenset()
_interpreted = False


def usable(operation: str, *tensors: Tensor | None, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the kernels of `operation` can take these tensors: their device and type fit and Triton is installed."""
    fit = all(_fits(x, dtype) for x in tensors if x is not None)
    return fit and operation not in _switched_off and installed()


def _fits(x: Tensor, dtype: torch.dtype) -> bool:
    if _interpreted:
        return x.device.type == "cpu" and x.dtype == torch.float32
    return x.is_cuda and x.dtype == dtype and x.device.index == torch.cuda.current_device()


@cache
def installed() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def channels_last(*maps: Tensor | None) -> bool:
    """Whether the (B, C, H, W) maps lie in memory as (B, H, W, C)."""
    return all(x.is_contiguous(memory_format=torch.channels_last) for x in maps if x is not None)


def switch_off() -> None:
    """Use plain torch in this process from here on."""
    global _switched_off
    _switched_off = frozenset(OPERATIONS)


@contextmanager
def plain(*operations: str) -> Iterator[None]:
    """Use plain torch inside, for these operations or for all: to compare and to time."""
    global _switched_off
    before, _switched_off = _switched_off, _switched_off | frozenset(operations or OPERATIONS)
    try:
        yield
    finally:
        _switched_off = before


@contextmanager
def interpreted() -> Iterator[None]:
    """Run kernels on float32 tensors on the CPU inside, in Triton's interpreter: for tests without a GPU.

    The environment variable TRITON_INTERPRET must be 1 before Triton is imported.
    """
    global _interpreted
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 before Triton is imported")
    before, _interpreted = _interpreted, True
    try:
        yield
    finally:
        _interpreted = before
