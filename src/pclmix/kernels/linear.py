"""Linear layers and LayerNorm over the last axis of bf16 maps.

Gradients of biases and scales are sums over all pixels: programs sum shares of the rows, a second kernel adds the
shares. residual_norm adds a branch and normalises in the same passes, since a residual block needs both results.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pclmix.kernels.compile import launch

ROWS, COLUMNS = 128, 32  # of a block
LINEAR_PROGRAMS = 1024  # share the rows of a sum
TERMS = 256  # of a block of the second stage
BLOCK = 2048  # values of a block: rows of it times the width, padded to a power of two
NORM_PROGRAMS = 528  # share the rows in the backward pass; each sums the parameters' gradients over its own
LARGEST = 1024  # channels


@triton.jit(do_not_specialize=["rows", "splits"])
def _bias_gradient_partial(x, partial, rows, columns, splits, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Each program sums every `splits`-th block of rows of its columns."""
    blocks = columns // COLUMNS
    split = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(split * ROWS, rows, splits * ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        total += tl.load(x + row.to(tl.int64) * columns + column[None, :], mask=row < rows, other=0).to(tl.float32)
    tl.store(partial + split * columns + column, tl.sum(total, 0))


@triton.jit(do_not_specialize=["terms"])
def _bias_gradient_finish(partial, out, terms, columns, TERMS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([TERMS, COLUMNS], tl.float32)
    for start in range(0, terms, TERMS):
        term = (start + tl.arange(0, TERMS))[:, None]
        total += tl.load(partial + term * columns + column[None, :], mask=term < terms, other=0)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty))


def sum_rows(x: Tensor) -> Tensor:
    """x (M, N) to (N), summed in float32; N is a multiple of 32."""
    rows, columns = x.shape
    blocks = columns // COLUMNS
    splits = min(triton.cdiv(rows, ROWS), max(1, LINEAR_PROGRAMS // blocks))
    partial = x.new_empty(splits, columns, dtype=torch.float32)
    launch(_bias_gradient_partial, (blocks * splits,))(x, partial, rows, columns, splits, ROWS, COLUMNS)
    return add_partial(partial, x.dtype)


def add_partial(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The second stage of a sum: partial (M, N) in float32 to (N), for an M of hundreds; N is a multiple of 32."""
    terms, columns = partial.shape
    out = partial.new_empty(columns, dtype=dtype)
    launch(_bias_gradient_finish, (columns // COLUMNS,))(partial, out, terms, columns, TERMS, COLUMNS)
    return out


def linear_fits(weight: Tensor) -> bool:
    return weight.shape[0] % COLUMNS == 0


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (..., I), weight (O, I), bias (O) to (..., O), all of one type."""
    y: Tensor = _Linear.apply(x, weight, bias)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dy = gradients[0].reshape(-1, weight.shape[0])
        dx = (dy @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return dx, dy.T @ x.reshape(-1, weight.shape[1]), sum_rows(dy.contiguous())


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
        # Rounded as it is stored: the backward pass reads it again.
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

    Adds the gradient of the sum, where that was used as well.
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


def norm_fits(weight: Tensor) -> bool:
    return len(weight) <= LARGEST and len(weight) % 16 == 0


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
        programs = min(NORM_PROGRAMS, triton.cdiv(rows, size[2]))
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
