"""Copies of channels-last maps, written once, with gradients read once.

upsample_concat repeats pixels 2 x 2 and concatenates a skip connection. fork gives one map to several readers and adds
their gradients in one pass; autograd would add them two at a time and pad that of a part of the batch with zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pclmix.kernels.compile import launch

PIXELS, CHANNELS = 64, 32  # of one program
BLOCK = 2048  # values of a program
READERS = 3


@triton.jit(do_not_specialize=["pixels", "width"])
def _upsample_forward(
    x, skip, out, pixels, width, x_channels, skip_channels, PIXELS: tl.constexpr, CHANNELS: tl.constexpr
):
    """A block of pixels of x: writes each four times, or copies the four pixels of the skip at its place."""
    channels = x_channels + skip_channels
    blocks = channels // CHANNELS
    block = tl.program_id(0) % blocks
    pixel = (tl.program_id(0) // blocks) * PIXELS + tl.arange(0, PIXELS)
    inside = (pixel < pixels)[:, None]
    channel = (block * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    pixel = pixel.to(tl.int64)
    # Rows of the result are twice as long and twice as many: pixel (r, c) of x has its first copy at (2r, 2c).
    first = pixel // width * 4 * width + pixel % width * 2
    if block * CHANNELS < x_channels:
        value = tl.load(x + pixel[:, None] * x_channels + channel, mask=inside)
        for corner in tl.static_range(4):
            place = (first + corner // 2 * 2 * width + corner % 2)[:, None]
            tl.store(out + place * channels + channel, value, mask=inside)
    else:
        for corner in tl.static_range(4):
            place = (first + corner // 2 * 2 * width + corner % 2)[:, None]
            value = tl.load(skip + place * skip_channels + channel - x_channels, mask=inside)
            tl.store(out + place * channels + channel, value, mask=inside)


@triton.jit(do_not_specialize=["pixels", "width"])
def _upsample_backward(
    dout, dx, dskip, pixels, width, x_channels, skip_channels, PIXELS: tl.constexpr, CHANNELS: tl.constexpr
):
    """The same blocks: sums four gradients for a pixel of x, or copies them to four pixels of the skip."""
    channels = x_channels + skip_channels
    blocks = channels // CHANNELS
    block = tl.program_id(0) % blocks
    pixel = (tl.program_id(0) // blocks) * PIXELS + tl.arange(0, PIXELS)
    inside = (pixel < pixels)[:, None]
    channel = (block * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    pixel = pixel.to(tl.int64)
    first = pixel // width * 4 * width + pixel % width * 2
    if block * CHANNELS < x_channels:
        total = tl.zeros([PIXELS, CHANNELS], tl.float32)
        for corner in tl.static_range(4):
            place = (first + corner // 2 * 2 * width + corner % 2)[:, None]
            total += tl.load(dout + place * channels + channel, mask=inside).to(tl.float32)
        tl.store(dx + pixel[:, None] * x_channels + channel, total.to(dx.dtype.element_ty), mask=inside)
    else:
        for corner in tl.static_range(4):
            place = (first + corner // 2 * 2 * width + corner % 2)[:, None]
            value = tl.load(dout + place * channels + channel, mask=inside)
            tl.store(dskip + place * skip_channels + channel - x_channels, value, mask=inside)


def upsample_fits(x: Tensor, skip: Tensor | None) -> bool:
    """Blocks of channels must not straddle x and skip."""
    return x.shape[1] % CHANNELS == 0 and (skip is None or skip.shape[1] % CHANNELS == 0)


def upsample_concat(x: Tensor, skip: Tensor | None) -> Tensor:
    """(B, C, H, W) and (B, S, 2H, 2W) to (B, C + S, 2H, 2W), all channels-last; without a skip only x, repeated."""
    out: Tensor = _UpsampleConcat.apply(x, skip)
    return out


class _UpsampleConcat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, skip: Tensor | None) -> Tensor:
        batch, x_channels, height, width = x.shape
        skip_channels = 0 if skip is None else skip.shape[1]
        ctx.shape, ctx.skip_channels = x.shape, skip_channels
        shape = (batch, x_channels + skip_channels, 2 * height, 2 * width)
        out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        _launch_upsample(_upsample_forward, x, x if skip is None else skip, out, x.shape, skip_channels)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        dout = gradients[0].contiguous(memory_format=torch.channels_last)
        batch, _, height, width = ctx.shape

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dout.dtype, device=dout.device, memory_format=torch.channels_last)

        dx = empty(*ctx.shape)
        dskip = empty(batch, ctx.skip_channels, 2 * height, 2 * width) if ctx.skip_channels else None
        _launch_upsample(_upsample_backward, dout, dx, dx if dskip is None else dskip, ctx.shape, ctx.skip_channels)
        return dx, dskip


def _launch_upsample(kernel: Any, a: Tensor, b: Tensor, c: Tensor, shape: torch.Size, skip_channels: int) -> None:
    batch, x_channels, height, width = shape
    pixels = batch * height * width
    grid = (triton.cdiv(pixels, PIXELS) * ((x_channels + skip_channels) // CHANNELS),)
    launch(kernel, grid)(a, b, c, pixels, width, x_channels, skip_channels, PIXELS, CHANNELS)


# The counts are multiples of 16, and the compiler must know it to read 16 bytes at once: no do_not_specialize.
@triton.jit
def _add_gradients(a, b, c, out, count_a, count_b, count_c, count, BLOCK: tl.constexpr):
    """A gradient of fewer images counts for the first images of the map; it is zero for the others."""
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
