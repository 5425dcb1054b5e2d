"""LayerNorm over the last axis of bf16 maps: several short rows a program, one pass forward and one backward.

In a residual network the map that is normalised is also handed on, and often a sum: both are part of the same passes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pclmix.nets.fused.linear import add_partial
from pclmix.rehearsal import launch

BLOCK = 2048  # values of a block: rows of it times the width, padded to a power of two
PROGRAMS = 528  # that share the rows in the backward pass, each adding up the parameters' gradients of its own
LARGEST = 1024  # channels


@triton.jit
def _standardise(value, inside, eps, C: tl.constexpr):
    """(x - mean) rstd and rstd of the rows of a block."""
    mean = tl.sum(value, 1) / C
    centred = tl.where(inside, value - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
    return centred * rstd[:, None], rstd


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_forward(
    x, branch, weight, bias, total, y, rows, eps,
    ADD: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, column = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, PADDED)[None, :]
    place, inside = row.to(tl.int64) * C + column, (row < rows) & (column < C)
    value = tl.load(x + place, mask=inside, other=0).to(tl.float32)
    if ADD:
        # Rounded as it is kept: the backward pass will read it again.
        rounded = (value + tl.load(branch + place, mask=inside, other=0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    standard, _ = _standardise(value, inside, eps, C)
    w, b = tl.load(weight + column, mask=column < C, other=0), tl.load(bias + column, mask=column < C, other=0)
    tl.store(y + place, (standard * w + b).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_backward(
    dy, dtotal, x, weight, dx, partial, rows, eps,
    ADD: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx = rstd (g - mean g - s mean gs) with g = weight dy and s the standardised row; sums of dy s and of dy.

    Where x was handed on as well, the gradient that comes back from there is added.
    """
    column = tl.arange(0, PADDED)[None, :]
    w = tl.load(weight + column, mask=column < C, other=0)
    dweight = tl.zeros([ROWS, PADDED], tl.float32)
    dbias = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        place, inside = row.to(tl.int64) * C + column, (row < rows) & (column < C)
        value = tl.load(x + place, mask=inside, other=0).to(tl.float32)
        gradient = tl.load(dy + place, mask=inside, other=0).to(tl.float32)
        standard, rstd = _standardise(value, inside, eps, C)
        dweight += gradient * standard
        dbias += gradient
        g = gradient * w
        mean, product = tl.sum(g, 1) / C, tl.sum(g * standard, 1) / C
        value = (g - mean[:, None] - standard * product[:, None]) * rstd[:, None]
        if ADD:
            value += tl.load(dtotal + place, mask=inside, other=0).to(tl.float32)
        tl.store(dx + place, value.to(dx.dtype.element_ty), mask=inside)
    place = tl.program_id(0) * 2 * C + tl.arange(0, PADDED)
    inside = tl.arange(0, PADDED) < C
    tl.store(partial + place, tl.sum(dweight, 0), mask=inside)
    tl.store(partial + C + place, tl.sum(dbias, 0), mask=inside)


def fits(weight: Tensor) -> bool:
    return len(weight) <= LARGEST and len(weight) % 16 == 0


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x (..., C) standardised along C, times weight plus bias, both (C) in float32; the result in x's type."""
    return residual_norm(x, None, weight, bias, eps)[1]


def residual_norm(x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + branch, or x alone, and its layer_norm. The gradients of both are added in the pass that computes one."""
    total, y = _ResidualNorm.apply(x, branch, weight, bias, eps)
    return total, y


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        x, add = x.contiguous(), branch is not None
        rows, size = _layout(x)
        y, total = torch.empty_like(x), torch.empty_like(x) if add else x
        grid = (triton.cdiv(rows, size[2]),)
        launch(_layer_norm_forward, grid)(
            x, x if branch is None else branch.contiguous(), weight, bias, total, y, rows, eps, add, *size
        )  # fmt: skip
        ctx.save_for_backward(total, weight)
        ctx.add, ctx.eps = add, eps
        return total, y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        dtotal, dy = gradients
        if dy is None:
            return dtotal, dtotal if ctx.add else None, None, None, None
        x, weight = ctx.saved_tensors
        dy, dx, handed = dy.contiguous(), torch.empty_like(x), dtotal is not None
        rows, size = _layout(x)
        programs = min(PROGRAMS, triton.cdiv(rows, size[2]))
        partial = x.new_empty(programs, 2 * x.shape[-1], dtype=torch.float32)
        launch(_layer_norm_backward, (programs,))(
            dy, dy if dtotal is None else dtotal.contiguous(), x, weight, dx, partial, rows, ctx.eps, handed, *size
        )  # fmt: skip
        dweight, dbias = add_partial(partial, torch.float32).chunk(2)
        return dx, dx if ctx.add else None, dweight, dbias, None


def _layout(x: Tensor) -> tuple[int, tuple[int, int, int]]:
    """Rows; channels, channels padded, and rows of a block."""
    channels = x.shape[-1]
    padded = triton.next_power_of_2(channels)
    return x.numel() // channels, (channels, padded, BLOCK // padded)
