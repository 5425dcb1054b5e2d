"""A map for several readers: their gradients are added in one pass, in the map's own order of axes.

Autograd adds two at a time, and gives the gradient of a slice of the batch as a map of zeros in another order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pclmix.rehearsal import launch

BLOCK = 2048  # values of a program
READERS = 3


# The counts are multiples of 16, and the compiler must know it to read 16 bytes at once: no do_not_specialize.
@triton.jit
def _add_gradients(a, b, c, out, count_a, count_b, count_c, count, BLOCK: tl.constexpr):
    """A gradient of fewer images is the beginning of the map, and zeros from there on."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(a + place, mask=place < count_a, other=0).to(tl.float32)
    total += tl.load(b + place, mask=place < count_b, other=0).to(tl.float32)
    total += tl.load(c + place, mask=place < count_c, other=0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < count)


def fork(x: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The first `count` images of x (B, C, H, W), channels-last, for each of at most three readers."""
    views: tuple[Tensor, ...] = _Fork.apply(x, counts)
    return views


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        return tuple(x[:count] for count in counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        given = [g.contiguous(memory_format=torch.channels_last) for g in gradients if g is not None]
        if not given or (len(given) == 1 and given[0].shape == ctx.shape):
            return (given[0] if given else None), None
        out = torch.empty(
            ctx.shape, dtype=given[0].dtype, device=given[0].device, memory_format=torch.channels_last
        )  # fmt: skip
        absent = READERS - len(given)
        counts = [g.numel() for g in given] + [0] * absent
        grid = (triton.cdiv(out.numel(), BLOCK),)
        launch(_add_gradients, grid)(*given, *[out] * absent, out, *counts, out.numel(), BLOCK)
        return out, None
