"""Kernels of the transformer decoder: linear layers and LayerNorm on bf16 maps, and window attention.

Gradients of biases and scales are sums over all pixels: programs sum shares of the rows, a second kernel adds the
shares. residual_norm adds a branch and normalises in the same passes, since a residual block needs both results.

Window attention reads and writes the map itself, without copies of windows and without rolling. One program holds all
64 pixels of a window for one head in registers. A shifted window is the same pixels at an offset, wrapped around the
map; pixels attend only to pixels that wrapped around the same sides. The backward pass computes the scores again
instead of storing them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pclmix.kernels import launch

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


WINDOW, WIDTH = 8, 32  # side of a window in pixels; channels of a head
PROGRAMS = 528  # share the windows in the backward pass; each sums the gradient of the bias over its own


@triton.jit
def _pixels(window, height, width, shift_y, shift_x, WINDOW: tl.constexpr):
    """Indices of a window's pixels in the map (B*H*W), and around which sides each wrapped (0 to 3)."""
    columns = width // WINDOW
    windows = height // WINDOW * columns
    place = window % windows
    pixel = tl.arange(0, WINDOW * WINDOW)
    y = place // columns * WINDOW + pixel // WINDOW + shift_y
    x = place % columns * WINDOW + pixel % WINDOW + shift_x
    region = (y >= height).to(tl.int32) * 2 + (x >= width).to(tl.int32)
    index = ((window // windows).to(tl.int64) * height + y % height) * width + x % width
    return index, region


@triton.jit
def _probabilities(q, k, bias, head, region, scale, N: tl.constexpr):
    """Softmax of the scores, (n, n) in float32."""
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    added = tl.load(bias + head * N * N + row * N + column).to(tl.float32)
    score = tl.dot(q, tl.trans(k)) * scale + added
    score = tl.where(region[:, None] == region[None, :], score, float("-inf"))
    weight = tl.exp(score - tl.max(score, 1)[:, None])
    return weight / tl.sum(weight, 1)[:, None]


@triton.jit(do_not_specialize=["height", "width", "heads", "shift_y", "shift_x"])
def _attention_forward(
    qkv, bias, out, height, width, heads, shift_y, shift_x, scale, WINDOW: tl.constexpr, WIDTH: tl.constexpr
):
    window, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    index, region = _pixels(window, height, width, shift_y, shift_x, WINDOW)
    channels = heads * WIDTH
    place = index[:, None] * (3 * channels) + head * WIDTH + tl.arange(0, WIDTH)[None, :]
    q, k, v = tl.load(qkv + place), tl.load(qkv + channels + place), tl.load(qkv + 2 * channels + place)
    p = _probabilities(q, k, bias, head, region, scale, WINDOW * WINDOW)
    y = tl.dot(p.to(v.dtype), v)
    tl.store(out + index[:, None] * channels + head * WIDTH + tl.arange(0, WIDTH)[None, :], y.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["height", "width", "heads", "windows", "splits", "shift_y", "shift_x"])
def _attention_backward(
    qkv, bias, dout, dqkv, partial, height, width, heads, windows, splits, shift_y, shift_x, scale,
    WINDOW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of q, k, v for every `splits`-th window, and the sum of the scores' gradients over these windows."""
    N: tl.constexpr = WINDOW * WINDOW
    split, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    channels = heads * WIDTH
    column = head * WIDTH + tl.arange(0, WIDTH)[None, :]
    dbias = tl.zeros([N, N], tl.float32)
    for window in range(split, windows, splits):
        index, region = _pixels(window, height, width, shift_y, shift_x, WINDOW)
        place = index[:, None] * (3 * channels) + column
        q, k, v = tl.load(qkv + place), tl.load(qkv + channels + place), tl.load(qkv + 2 * channels + place)
        dy = tl.load(dout + index[:, None] * channels + column)
        p = _probabilities(q, k, bias, head, region, scale, N)
        dv = tl.dot(tl.trans(p.to(dy.dtype)), dy)
        dp = tl.dot(dy, tl.trans(v))
        dscore = p * (dp - tl.sum(p * dp, 1)[:, None])
        dbias += dscore
        rounded = dscore.to(q.dtype)
        dq = tl.dot(rounded, k) * scale
        dk = tl.dot(tl.trans(rounded), q) * scale
        tl.store(dqkv + place, dq.to(dqkv.dtype.element_ty))
        tl.store(dqkv + channels + place, dk.to(dqkv.dtype.element_ty))
        tl.store(dqkv + 2 * channels + place, dv.to(dqkv.dtype.element_ty))
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(partial + ((split * heads + head) * N + row) * N + column, dbias)


def fits(height: int, width: int, window: tuple[int, int], channels: int, heads: int) -> bool:
    """Whole windows of 8 x 8 and heads of 32 channels."""
    return window == (WINDOW, WINDOW) and height % WINDOW == width % WINDOW == 0 and channels == heads * WIDTH


def window_attention(qkv: Tensor, bias: Tensor, heads: int, shift: tuple[int, int]) -> Tensor:
    """Attend: qkv (B, H, W, 3C), bias of the scores (heads, n, n), returns (B, H, W, C)."""
    out: Tensor = _WindowAttention.apply(qkv, bias, heads, shift)
    return out


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor, heads: int, shift: tuple[int, int]) -> Tensor:
        qkv, bias = qkv.contiguous(), bias.to(qkv.dtype).contiguous()
        batch, height, width, channels = qkv.shape
        out = qkv.new_empty(batch, height, width, channels // 3)
        windows = batch * height * width // WINDOW**2
        launch(_attention_forward, (windows * heads,))(
            qkv, bias, out, height, width, heads, *shift, WIDTH**-0.5, WINDOW, WIDTH
        )
        ctx.save_for_backward(qkv, bias)
        ctx.heads, ctx.shift = heads, shift
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        qkv, bias = ctx.saved_tensors
        dout, dqkv, heads = gradients[0].contiguous(), torch.empty_like(qkv), ctx.heads
        batch, height, width, _ = qkv.shape
        windows = batch * height * width // WINDOW**2
        splits = min(windows, triton.cdiv(PROGRAMS, heads))
        partial = qkv.new_empty(splits, *bias.shape, dtype=torch.float32)
        launch(_attention_backward, (splits * heads,))(
            qkv, bias, dout, dqkv, partial, height, width, heads, windows, splits, *ctx.shift, WIDTH**-0.5,
            WINDOW, WIDTH,
        )  # fmt: skip
        return dqkv, partial.sum(0), None, None
