"""Kernels on channels-last maps: copies written once with gradients read once, and the last decoder layer.

upsample_concat repeats pixels 2 x 2 and concatenates a skip connection. fork gives one map to several readers and adds
their gradients in one pass; autograd would add them two at a time and pad that of a part of the batch with zeros.

The last layer of the transformer decoder needs no 16-fold map (nets/swin.py: ExpandAndClassify). squared_norms:
|E_s x|^2 for several matrices E_s and many x, without ever storing a product E_s x. place_logits: the scores of the
pixels under a coarse pixel, each divided by its own norm, at their places in the fine map:
logits[4y + i, 4x + j] = scores[y, x, (i, j)] / sqrt(norms[y, x, (i, j)] / C + eps) + bias.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pclmix.kernels import launch

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


ROWS = 128  # of a block
SPLITS = 32  # programs share the rows of a sum
LAUNCH = {"num_warps": 8, "num_stages": 2}  # so that two programs fit a multiprocessor
PIXELS = 64  # of the coarse map, of one program


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


def norms_fit(matrices: Tensor) -> bool:
    """A padded matrix must be large enough for the tensor cores and small enough for a multiprocessor."""
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


@triton.jit
def _places(pixel, i, width, K: tl.constexpr, PADDED: tl.constexpr, FACTOR: tl.constexpr):
    """Indices of the fine pixels (i, 0), (i, 1), ... of coarse ones in the scores and in the logits; and k."""
    j, k = tl.arange(0, FACTOR)[None, :, None], tl.arange(0, PADDED)[None, None, :]
    pixel = pixel[:, None, None]
    row, column = pixel // width * FACTOR + i, pixel % width * FACTOR + j
    source = (pixel.to(tl.int64) * FACTOR + i) * FACTOR + j
    return source * K + k, (row.to(tl.int64) * width * FACTOR + column) * K + k, k


@triton.jit
def _scale(norms, pixel, i, pixels, channels, eps, FACTOR: tl.constexpr):
    """1 / sqrt(norms / C + eps), norms (S, pixels), and the indices of these norms."""
    s = i * FACTOR + tl.arange(0, FACTOR)[None, :]
    place = s * pixels + pixel[:, None]
    return 1.0 / tl.sqrt(tl.load(norms + place, mask=pixel[:, None] < pixels, other=1) / channels + eps), place


@triton.jit(do_not_specialize=["pixels", "width"])
def _logits_forward(
    scores, norms, bias, out, pixels, width, channels, eps,
    K: tl.constexpr, PADDED: tl.constexpr, FACTOR: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    for i in tl.static_range(FACTOR):
        source, target, k = _places(pixel, i, width, K, PADDED, FACTOR)
        inside = (pixel < pixels)[:, None, None] & (k < K)
        scale, _ = _scale(norms, pixel, i, pixels, channels, eps, FACTOR)
        score = tl.load(scores + source, mask=inside, other=0).to(tl.float32)
        value = score * scale[:, :, None] + tl.load(bias + k, mask=k < K, other=0)
        tl.store(out + target, value, mask=inside)


@triton.jit(do_not_specialize=["pixels", "width"])
def _logits_backward(
    dout, scores, norms, dscores, dnorms, partial, pixels, width, channels, eps,
    K: tl.constexpr, PADDED: tl.constexpr, FACTOR: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """With f = (n / C + eps)^(-1/2): dscores = f g, dn = -f^3 / (2 C) sum_k g score, and the sum of g for the bias."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    total = tl.zeros([PADDED], tl.float32)
    for i in tl.static_range(FACTOR):
        source, target, k = _places(pixel, i, width, K, PADDED, FACTOR)
        inside = (pixel < pixels)[:, None, None] & (k < K)
        scale, place = _scale(norms, pixel, i, pixels, channels, eps, FACTOR)
        gradient = tl.load(dout + target, mask=inside, other=0).to(tl.float32)
        score = tl.load(scores + source, mask=inside, other=0).to(tl.float32)
        tl.store(dscores + source, (gradient * scale[:, :, None]).to(dscores.dtype.element_ty), mask=inside)
        dnorm = -0.5 / channels * scale * scale * scale * tl.sum(gradient * score, 2)
        tl.store(dnorms + place, dnorm, mask=pixel[:, None] < pixels)
        total += tl.sum(tl.sum(gradient, 0), 0)
    k = tl.arange(0, PADDED)
    tl.store(partial + tl.program_id(0) * K + k, total, mask=k < K)


def place_logits(scores: Tensor, norms: Tensor, bias: Tensor, channels: int, eps: float) -> Tensor:
    """scores (B, H, W, S * K), norms (B, H, W, S), bias (K) to (B, K, fH, fW), f^2 = S, in float32, channels-last."""
    # The order in which the norms are computed, so that this is a view.
    flat = norms.permute(3, 0, 1, 2).reshape(norms.shape[3], -1)
    logits: Tensor = _PlaceLogits.apply(scores, flat, bias, channels, eps)
    return logits


class _PlaceLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, norms: Tensor, bias: Tensor, channels: int, eps: float) -> Tensor:
        scores, norms = scores.contiguous(), norms.contiguous()
        batch, height, width, _ = scores.shape
        factor, classes = round(len(norms) ** 0.5), len(bias)
        out = torch.empty(
            (batch, classes, factor * height, factor * width),
            dtype=torch.float32, device=scores.device, memory_format=torch.channels_last,
        )  # fmt: skip
        ctx.save_for_backward(scores, norms)
        ctx.size = (classes, triton.next_power_of_2(classes), factor, PIXELS)
        ctx.channels, ctx.eps = channels, eps
        pixels = norms.shape[1]
        grid = (triton.cdiv(pixels, PIXELS),)
        launch(_logits_forward, grid)(scores, norms, bias, out, pixels, width, channels, eps, *ctx.size)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scores, norms = ctx.saved_tensors
        dout = gradients[0].contiguous(memory_format=torch.channels_last)
        dscores, dnorms = torch.empty_like(scores), torch.empty_like(norms)
        pixels, width = norms.shape[1], scores.shape[2]
        programs = triton.cdiv(pixels, PIXELS)
        partial = norms.new_empty(programs, ctx.size[0])
        launch(_logits_backward, (programs,))(
            dout, scores, norms, dscores, dnorms, partial, pixels, width, ctx.channels, ctx.eps, *ctx.size
        )
        return dscores, dnorms, partial.sum(0), None, None
