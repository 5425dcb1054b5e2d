"""Operations of training that are bound by memory on a GPU, each as few passes over its maps as possible.

One file holds one operation: its Triton kernels and the autograd function around them. They take bf16 maps in
channels-last order on a CUDA device. Whoever calls one asks `usable` first and otherwise runs the plain torch
operations, which are the definition: a test compares the two. Kernels have fixed block sizes (nothing is tuned at run
time, so that a graph can be captured), add in a fixed order (atomics only count) and sum in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

OPERATIONS = (
    "attention",
    "batchnorm",
    "fork",
    "layernorm",
    "linear",
    "logits",
    "losses",
    "pointwise",
    "squared_norm",
    "upsample",
)

_switched_off: frozenset[str] = frozenset()


def usable(operation: str, *maps: Tensor | None) -> bool:
    """Whether a kernel can take these maps: bf16, on the current CUDA device, with Triton installed."""
    return operation not in _switched_off and all(_fits(x) for x in maps if x is not None) and installed()


def _fits(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and x.device.index == torch.cuda.current_device()


@cache
def installed() -> bool:
    """Whether there is Triton."""
    return find_spec("triton") is not None


def channels_last(*maps: Tensor | None) -> bool:
    """Whether the (B, C, H, W) maps lie in memory as (B, H, W, C)."""
    return all(x.is_contiguous(memory_format=torch.channels_last) for x in maps if x is not None)


def switch_off() -> None:
    """Plain torch from here on, for the whole process."""
    global _switched_off
    _switched_off = frozenset(OPERATIONS)


@contextmanager
def plain(*operations: str) -> Iterator[None]:
    """Inside, plain torch for these operations, or for all where none is named: for comparisons."""
    global _switched_off
    before, _switched_off = _switched_off, _switched_off | frozenset(operations or OPERATIONS)
    try:
        yield
    finally:
        _switched_off = before
