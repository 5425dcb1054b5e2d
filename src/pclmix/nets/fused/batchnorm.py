"""BatchNorm, addition of a residual and ReLU on channels-last maps: two passes forward, two backward.

A map (B, C, H, W) in channels-last order is a matrix of B*H*W rows and C columns; kernels take blocks of it, COLUMNS
wide. A map of fewer channels has several pixels in one row, and a column belongs to channel `column % channels`.
Sums over rows have two stages: each program sums its own rows into a row of `partial`, and the last program of a block
of columns to arrive there adds these, always in the same order, and works out what the next kernel needs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 64, 64  # of a block
SUMMED_ROWS = 128  # of a block of a sum
PROGRAMS = 264  # that share a sum: two for each of 132 multiprocessors, all at work at the same time
TERMS = 64  # of a block of the second stage
BLOCKS = 1024  # of columns at most
_SUMMED = (SUMMED_ROWS, COLUMNS, TERMS)
SUM = {"num_warps": 8, "maxnreg": 128}  # so that two programs do fit a multiprocessor


@triton.jit
def _is_last(partial, place, splits, columns, counters, first, second):
    """Keep the sums of this program's rows; whether all programs of this block of columns have now done so."""
    tl.store(partial + place, first)
    tl.store(partial + splits * columns + place, second)
    tl.debug_barrier()  # all threads have stored before one of them says so
    counter = counters + tl.program_id(0)
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        tl.store(counter, 0)  # for the next kernel
    return last


@triton.jit
def _add_partial(partial, channel, terms, channels, TERMS: tl.constexpr, WIDTH: tl.constexpr):
    """Both sums of a block of channels. A row of `partial` with several pixels is as many terms of a channel."""
    first = tl.zeros([TERMS, WIDTH], tl.float32)
    second = tl.zeros([TERMS, WIDTH], tl.float32)
    for start in range(0, terms, TERMS):
        term = (start + tl.arange(0, TERMS))[:, None]
        place = term * channels + channel[None, :]
        first += tl.load(partial + place, mask=term < terms, other=0)
        second += tl.load(partial + terms * channels + place, mask=term < terms, other=0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit(do_not_specialize=["rows", "splits", "count"])
def _batch_norm_moments(
    x, partial, counters, weight, bias, running_mean, running_var, tracked, stats,
    rows, columns, channels, splits, count, eps, momentum,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Mean and variance, the running ones moved towards them, and y = scale x + shift: stats (4, C) for the rest.

    Sums of x - pivot and of its square: the pivot, a channel's first value, keeps large means from cancelling.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    pivot = tl.load(x + column % channels).to(tl.float32)[None, :]
    first = tl.zeros([ROWS, COLUMNS], tl.float32)
    second = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(split * ROWS, rows, splits * ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        place = row.to(tl.int64) * columns + column[None, :]
        value = tl.load(x + place, mask=row < rows, other=0).to(tl.float32)
        centred = tl.where(row < rows, value - pivot, 0.0)
        first += centred
        second += centred * centred
    if _is_last(partial, split * columns + column, splits, columns, counters, tl.sum(first, 0), tl.sum(second, 0)):
        channel = tl.program_id(0) * COLUMNS + tl.arange(0, WIDTH)
        total, square = _add_partial(partial, channel, splits * (columns // channels), channels, TERMS, WIDTH)
        offset = total / count
        mean = tl.load(x + channel).to(tl.float32) + offset
        variance = tl.maximum(square / count - offset * offset, 0.0)
        old_mean, old_var = tl.load(running_mean + channel), tl.load(running_var + channel)
        tl.store(running_mean + channel, old_mean + momentum * (mean - old_mean))
        tl.store(running_var + channel, old_var + momentum * (variance * (count / (count - 1.0)) - old_var))
        if tl.program_id(0) == 0:
            tl.store(tracked, tl.load(tracked) + 1)
        rstd = 1.0 / tl.sqrt(variance + eps)
        scale = tl.load(weight + channel) * rstd
        tl.store(stats + channel, mean)
        tl.store(stats + channels + channel, rstd)
        tl.store(stats + 2 * channels + channel, scale)
        tl.store(stats + 3 * channels + channel, tl.load(bias + channel) - mean * scale)


@triton.jit(do_not_specialize=["rows"])
def _batch_norm_forward(
    x, residual, y, stats, rows, columns, channels,
    ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = scale x + shift (+ residual), then max(y, 0)."""
    blocks = columns // COLUMNS
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    channel = column % channels
    scale, shift = tl.load(stats + 2 * channels + channel), tl.load(stats + 3 * channels + channel)
    row = (tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS))[:, None]
    place, inside = row.to(tl.int64) * columns + column[None, :], row < rows
    value = tl.load(x + place, mask=inside).to(tl.float32) * scale[None, :] + shift[None, :]
    if ADD:
        value += tl.load(residual + place, mask=inside).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(y + place, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _through_relu(dy, x, y, place, inside, scale, shift, ADD: tl.constexpr, RELU: tl.constexpr):
    """The gradient behind the ReLU, and x. Without a residual the sign of y comes from x, and y is not read."""
    gradient = tl.load(dy + place, mask=inside, other=0).to(tl.float32)
    value = tl.load(x + place, mask=inside, other=0).to(tl.float32)
    if RELU:
        if ADD:
            gradient = tl.where(tl.load(y + place, mask=inside, other=0) > 0, gradient, 0.0)
        else:
            gradient = tl.where(value * scale[None, :] + shift[None, :] > 0, gradient, 0.0)
    return gradient, value


@triton.jit(do_not_specialize=["rows", "splits", "count"])
def _batch_norm_sum_gradient(
    dy, x, y, stats, partial, counters, dweight, dbias, line, rows, columns, channels, splits, count,
    ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TERMS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of weight and bias; dx = scale (g - mean g - (x - mean) rstd^2 mean g(x - mean)) = scale g + line.

    From sums of g and of g (x - mean), g being the gradient behind the ReLU.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split, own = tl.program_id(1), column % channels
    centre = tl.load(stats + own)[None, :]
    scale, shift = tl.load(stats + 2 * channels + own), tl.load(stats + 3 * channels + own)
    first = tl.zeros([ROWS, COLUMNS], tl.float32)
    second = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(split * ROWS, rows, splits * ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        place = row.to(tl.int64) * columns + column[None, :]
        gradient, value = _through_relu(dy, x, y, place, row < rows, scale, shift, ADD, RELU)
        first += gradient
        second += gradient * (value - centre)
    if _is_last(partial, split * columns + column, splits, columns, counters, tl.sum(first, 0), tl.sum(second, 0)):
        channel = tl.program_id(0) * COLUMNS + tl.arange(0, WIDTH)
        total, product = _add_partial(partial, channel, splits * (columns // channels), channels, TERMS, WIDTH)
        mean, rstd = tl.load(stats + channel), tl.load(stats + channels + channel)
        factor = tl.load(stats + 2 * channels + channel)
        tl.store(dweight + channel, product * rstd)
        tl.store(dbias + channel, total)
        slope = -factor * rstd * rstd * product / count
        tl.store(line + channel, slope)
        tl.store(line + channels + channel, -factor * total / count - slope * mean)


@triton.jit(do_not_specialize=["rows"])
def _batch_norm_backward(
    dy, x, y, stats, line, dx, dresidual, rows, columns, channels,
    ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx = scale g + slope x + constant; the residual's gradient is g itself."""
    blocks = columns // COLUMNS
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    channel = column % channels
    scale, shift = tl.load(stats + 2 * channels + channel), tl.load(stats + 3 * channels + channel)
    slope, constant = tl.load(line + channel), tl.load(line + channels + channel)
    row = (tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS))[:, None]
    place, inside = row.to(tl.int64) * columns + column[None, :], row < rows
    gradient, value = _through_relu(dy, x, y, place, inside, scale, shift, ADD, RELU)
    if ADD:
        tl.store(dresidual + place, gradient.to(dresidual.dtype.element_ty), mask=inside)
    value = gradient * scale[None, :] + value * slope[None, :] + constant[None, :]
    tl.store(dx + place, value.to(dx.dtype.element_ty), mask=inside)


def fits(x: Tensor) -> bool:
    """Whether the map is whole blocks of columns."""
    channels = x.shape[1]
    return (
        channels % 16 == 0
        and max(channels, COLUMNS) % min(channels, COLUMNS) == 0
        and x.numel() % COLUMNS == 0
        and channels <= BLOCKS * COLUMNS
    )


def batch_norm_act(x: Tensor, residual: Tensor | None, norm: torch.nn.BatchNorm2d, relu: bool) -> Tensor:
    """relu(norm(x) + residual) in training: x, residual (B, C, H, W) channels-last. Moves the running statistics."""
    buffers = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    y: Tensor = _BatchNormAct.apply(x, residual, norm.weight, norm.bias, buffers, norm.momentum, norm.eps, relu)
    return y


class _BatchNormAct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        buffers: tuple[Tensor, Tensor, Tensor],
        momentum: float,
        eps: float,
        relu: bool,
    ) -> Tensor:
        rows, columns, channels, splits = _layout(x)
        blocks = columns // COLUMNS
        partial = x.new_empty(2, splits, columns, dtype=torch.float32)
        stats = x.new_empty(4, channels, dtype=torch.float32)
        _batch_norm_moments[(blocks, splits)](
            x, partial, _counters(x.device), weight, bias, *buffers, stats,
            rows, columns, channels, splits, x.numel() // channels, eps, momentum,
            *_SUMMED, min(channels, COLUMNS), **SUM,
        )  # fmt: skip
        y, add = torch.empty_like(x), residual is not None
        grid = (blocks * triton.cdiv(rows, ROWS),)
        _batch_norm_forward[grid](
            x, residual if add else x, y, stats, rows, columns, channels, add, relu, ROWS, COLUMNS
        )  # fmt: skip
        ctx.save_for_backward(x, y if add and relu else x, stats)  # elsewhere y is not read
        ctx.add, ctx.relu = add, relu
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, y, stats = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        rows, columns, channels, splits = _layout(x)
        blocks, kind = columns // COLUMNS, (ctx.add, ctx.relu)
        partial = x.new_empty(2, splits, columns, dtype=torch.float32)
        dweight, dbias, line = (x.new_empty(n, channels, dtype=torch.float32) for n in (1, 1, 2))
        _batch_norm_sum_gradient[(blocks, splits)](
            dy, x, y, stats, partial, _counters(x.device), dweight, dbias, line,
            rows, columns, channels, splits, x.numel() // channels, *kind, *_SUMMED, min(channels, COLUMNS), **SUM,
        )  # fmt: skip
        dx = torch.empty_like(x)
        dresidual = torch.empty_like(x) if ctx.add else None
        grid = (blocks * triton.cdiv(rows, ROWS),)
        _batch_norm_backward[grid](
            dy, x, y, stats, line, dx, dresidual if ctx.add else dx, rows, columns, channels, *kind, ROWS, COLUMNS
        )  # fmt: skip
        return dx, dresidual, dweight[0], dbias[0], None, None, None, None


@cache
def _counters(device: torch.device) -> Tensor:
    """Zeros, one for each block of columns, which every kernel leaves as zeros: they run one after another."""
    return torch.zeros(BLOCKS, dtype=torch.int32, device=device)


def _layout(x: Tensor) -> tuple[int, int, int, int]:
    """Rows and columns of the matrix, channels, and how many programs share the rows of a block of columns."""
    channels = x.shape[1]
    columns = max(channels, COLUMNS)
    rows = x.numel() // columns
    parts = triton.cdiv(rows, SUMMED_ROWS)
    # As few programs as need the same number of turns.
    turns = triton.cdiv(parts, max(1, PROGRAMS // (columns // COLUMNS)))
    return rows, columns, channels, triton.cdiv(parts, turns)
