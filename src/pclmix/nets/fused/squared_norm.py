"""|E_s x|^2 for several matrices E_s and many x, without ever storing a product E_s x."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pclmix.rehearsal import launch

ROWS = 128  # of a block
SPLITS = 32  # programs that share the rows of a sum over all of them
LAUNCH = {"num_warps": 8, "num_stages": 2}  # so that two programs fit a multiprocessor


@triton.jit
def _load_matrix(matrices, s, C: tl.constexpr, PADDED: tl.constexpr):
    """Matrix s, (C, C) padded with zeros to a power of two, which a product needs."""
    row, column = tl.arange(0, PADDED)[:, None], tl.arange(0, PADDED)[None, :]
    return tl.load(matrices + (s * C + row) * C + column, mask=(row < C) & (column < C), other=0)


@triton.jit
def _load_rows(x, row, rows, C: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)[None, :]
    inside = (row[:, None] < rows) & (column < C)
    return tl.load(x + row[:, None].to(tl.int64) * C + column, mask=inside, other=0)


@triton.jit(do_not_specialize=["rows", "count"])
def _squared_norm_forward(x, matrices, out, rows, count, C: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """out (S, rows): squared lengths of E_s x."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    value = _load_rows(x, row, rows, C, PADDED)
    for s in range(count):
        product = tl.dot(value, tl.trans(_load_matrix(matrices, s, C, PADDED)))
        tl.store(out + s * rows + row, tl.sum(product * product, 1), mask=row < rows)


@triton.jit(do_not_specialize=["rows", "count"])
def _squared_norm_backward(
    x, grams, gradient, dx, rows, count, C: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):
    """dx = 2 sum_s g_s E_s'E_s x, from the Gram matrices E_s'E_s."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    value = _load_rows(x, row, rows, C, PADDED)
    total = tl.zeros([ROWS, PADDED], tl.float32)
    for s in range(count):
        g = tl.load(gradient + s * rows + row, mask=row < rows, other=0)
        total += tl.dot((value * g[:, None]).to(value.dtype), _load_matrix(grams, s, C, PADDED))
    column = tl.arange(0, PADDED)[None, :]
    place = row[:, None].to(tl.int64) * C + column
    tl.store(dx + place, (2 * total).to(dx.dtype.element_ty), mask=(row[:, None] < rows) & (column < C))


@triton.jit(do_not_specialize=["rows", "count", "splits"])
def _squared_norm_gram(
    x, gradient, partial, rows, count, splits, C: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):
    """sum over rows of g_s x x', this program's share of it: the gradient of E_s is 2 E_s times that."""
    split, s = tl.program_id(0) // count, tl.program_id(0) % count
    total = tl.zeros([PADDED, PADDED], tl.float32)
    for start in range(split * ROWS, rows, splits * ROWS):
        row = start + tl.arange(0, ROWS)
        value = _load_rows(x, row, rows, C, PADDED)
        g = tl.load(gradient + s * rows + row, mask=row < rows, other=0)
        total += tl.dot(tl.trans((value * g[:, None]).to(value.dtype)), value)
    row, column = tl.arange(0, PADDED)[:, None], tl.arange(0, PADDED)[None, :]
    place = ((split * count + s) * C + row) * C + column
    tl.store(partial + place, total, mask=(row < C) & (column < C))


def fits(matrices: Tensor) -> bool:
    """A padded matrix must suit the tensor cores and fit a multiprocessor."""
    return 16 <= matrices.shape[-1] <= 128


def squared_norms(x: Tensor, matrices: Tensor) -> Tensor:
    """Rows x (..., C) and matrices (S, C, C) in float32 to (..., S), float32. The product is computed in x's type."""
    norms: Tensor = _SquaredNorms.apply(x.reshape(-1, x.shape[-1]), matrices)
    return norms.T.view(*x.shape[:-1], -1)


class _SquaredNorms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor) -> Tensor:
        count, channels, _ = matrices.shape
        x = x.contiguous()
        out = x.new_empty(count, len(x), dtype=torch.float32)
        grid, size = (triton.cdiv(len(x), ROWS),), (channels, triton.next_power_of_2(channels), ROWS)
        launch(_squared_norm_forward, grid)(x, matrices.to(x.dtype).contiguous(), out, len(x), count, *size, **LAUNCH)
        ctx.save_for_backward(x, matrices)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, matrices = ctx.saved_tensors
        gradient = gradients[0].float().contiguous()
        count, channels, _ = matrices.shape
        size = (channels, triton.next_power_of_2(channels), ROWS)
        grams = torch.bmm(matrices.transpose(1, 2), matrices).to(x.dtype)
        dx = torch.empty_like(x)
        grid = (triton.cdiv(len(x), ROWS),)
        launch(_squared_norm_backward, grid)(x, grams, gradient, dx, len(x), count, *size, **LAUNCH)
        partial = x.new_empty(SPLITS, count, channels, channels, dtype=torch.float32)
        launch(_squared_norm_gram, (SPLITS * count,))(x, gradient, partial, len(x), count, SPLITS, *size, **LAUNCH)
        return dx, 2 * torch.bmm(matrices, partial.sum(0))
