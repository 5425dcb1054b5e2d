"""LayerNorm over the last axis of bf16 maps: several short rows a program, one pass forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # values of a block: rows of it times the width, padded to a power of two
PROGRAMS = 528  # that share the rows in the backward pass, each adding up the parameters' gradients of its own
LARGEST = 1024  # channels


@triton.jit
def _standardise(x, place, inside, eps, C: tl.constexpr):
    """(x - mean) rstd and rstd of the rows of a block."""
    value = tl.load(x + place, mask=inside, other=0).to(tl.float32)
    mean = tl.sum(value, 1) / C
    centred = tl.where(inside, value - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
    return centred * rstd[:, None], rstd


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_forward(x, weight, bias, y, rows, eps, C: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    row, column = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, PADDED)[None, :]
    place, inside = row.to(tl.int64) * C + column, (row < rows) & (column < C)
    standard, _ = _standardise(x, place, inside, eps, C)
    w, b = tl.load(weight + column, mask=column < C, other=0), tl.load(bias + column, mask=column < C, other=0)
    tl.store(y + place, (standard * w + b).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_backward(
    dy, x, weight, dx, partial, rows, eps, C: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):
    """dx = rstd (g - mean g - s mean gs) with g = weight dy and s the standardised row; sums of dy s and of dy."""
    column = tl.arange(0, PADDED)[None, :]
    w = tl.load(weight + column, mask=column < C, other=0)
    dweight = tl.zeros([ROWS, PADDED], tl.float32)
    dbias = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        place, inside = row.to(tl.int64) * C + column, (row < rows) & (column < C)
        standard, rstd = _standardise(x, place, inside, eps, C)
        gradient = tl.load(dy + place, mask=inside, other=0).to(tl.float32)
        dweight += gradient * standard
        dbias += gradient
        g = gradient * w
        mean, product = tl.sum(g, 1) / C, tl.sum(g * standard, 1) / C
        value = (g - mean[:, None] - standard * product[:, None]) * rstd[:, None]
        tl.store(dx + place, value.to(dx.dtype.element_ty), mask=inside)
    place = tl.program_id(0) * C + tl.arange(0, PADDED)
    inside = tl.arange(0, PADDED) < C
    tl.store(partial + place, tl.sum(dweight, 0), mask=inside)
    tl.store(partial + tl.num_programs(0) * C + place, tl.sum(dbias, 0), mask=inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x (..., C) standardised along C, times weight plus bias, both (C) in float32; the result in x's type."""
    y: Tensor = _LayerNorm.apply(x, weight, bias, eps)
    return y


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        rows, size = _layout(x)
        y = torch.empty_like(x)
        _layer_norm_forward[(triton.cdiv(rows, size[2]),)](x, weight, bias, y, rows, eps, *size)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dy, dx = gradients[0].contiguous(), torch.empty_like(x)
        rows, size = _layout(x)
        programs = min(PROGRAMS, triton.cdiv(rows, size[2]))
        partial = x.new_empty(2, programs, x.shape[-1], dtype=torch.float32)
        _layer_norm_backward[(programs,)](dy, x, weight, dx, partial, rows, ctx.eps, *size)
        dweight, dbias = partial.sum(1)
        return dx, dweight, dbias, None


def _layout(x: Tensor) -> tuple[int, tuple[int, int, int]]:
    """Rows; channels, channels padded, and rows of a block."""
    channels = x.shape[-1]
    padded = triton.next_power_of_2(channels)
    return x.numel() // channels, (channels, padded, BLOCK // padded)
