"""Window attention that reads and writes the map itself, without copies of windows and without rolling.

One program holds all 64 pixels of a window for one head in registers. A shifted window is the same pixels at an offset,
wrapped around the map; pixels attend only to pixels that wrapped around the same sides. The backward pass computes the
scores again instead of storing them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pclmix.kernels.compile import launch

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
