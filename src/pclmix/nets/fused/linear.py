"""A linear layer whose bias's gradient, a sum over all pixels, runs at the speed of memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pclmix.rehearsal import launch

ROWS, COLUMNS = 128, 32  # of a block
PROGRAMS = 1024  # that share the rows of a sum
TERMS = 256  # of a block of the second stage


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
    splits = min(triton.cdiv(rows, ROWS), max(1, PROGRAMS // blocks))
    partial = x.new_empty(splits, columns, dtype=torch.float32)
    launch(_bias_gradient_partial, (blocks * splits,))(x, partial, rows, columns, splits, ROWS, COLUMNS)
    return add_partial(partial, x.dtype)


def add_partial(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The second stage of a sum: partial (M, N) in float32 to (N), for an M of hundreds; N is a multiple of 32."""
    terms, columns = partial.shape
    out = partial.new_empty(columns, dtype=dtype)
    launch(_bias_gradient_finish, (columns // COLUMNS,))(partial, out, terms, columns, TERMS, COLUMNS)
    return out


def fits(weight: Tensor) -> bool:
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
