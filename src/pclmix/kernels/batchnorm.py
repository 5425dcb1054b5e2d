"""BatchNorm, addition of a residual and ReLU on channels-last maps: two passes forward, two backward.

A map (B, C, H, W) in channels-last order is a matrix of B*H*W rows and C columns; kernels take blocks of it, COLUMNS
wide. A map of fewer channels has several pixels in one row, and a column belongs to channel `column % channels`.
Sums over rows have two stages: each program sums its own rows into a row of `partial`; the last program to finish a
block of columns adds these rows, always in the same order, and computes what the next kernel needs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pclmix.kernels import launch

ROWS, COLUMNS = 64, 64  # of a block
SUMMED_ROWS, SUMMED_GRADIENTS = 128, 64  # of a block of a sum, and of one that reads up to five maps
READERS = 3
PROGRAMS = 264  # share a sum: two for each of 132 multiprocessors, all running at the same time
TERMS = 64  # of a block of the second stage
BLOCKS = 1024  # of columns at most
SUM = {"num_warps": 8, "maxnreg": 128}  # so that two programs fit a multiprocessor


@triton.jit
def _is_last(partial, place, splits, columns, counters, first, second):
    """Store the sums of this program's rows; True in the last program of this block of columns to do so."""
    tl.store(partial + place, first)
    tl.store(partial + splits * columns + place, second)
    tl.debug_barrier()  # all threads must have stored before one of them counts
    counter = counters + tl.program_id(0)
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        tl.store(counter, 0)  # for the next kernel
    return last


@triton.jit
def _add_partial(partial, channel, terms, channels, TERMS: tl.constexpr, WIDTH: tl.constexpr):
    """Both sums of a block of channels; a row of `partial` with several pixels has several terms of a channel."""
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
    """Mean and variance, the update of the running ones, and scale and shift of y = scale x + shift: stats (4, C).

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


@triton.jit(do_not_specialize=["rows", "splits", "count"])
def _batch_norm_sum_gradient(
    dy, dy2, dy3, x, y, g, stats, partial, counters, dweight, dbias, line, rows, columns, channels, splits, count,
    READERS: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, KEEP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of weight and bias; dx = scale (g - mean g - (x - mean) rstd^2 mean g(x - mean)) = scale g + line.

    From sums of g and of g (x - mean), g being the sum of the readers' gradients behind the ReLU. It is kept where it
    is the residual's gradient too, or more than one map was read for it. Without a residual the sign of y comes from x.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split, own = tl.program_id(1), column % channels
    centre = tl.load(stats + own)[None, :]
    scale, shift = tl.load(stats + 2 * channels + own)[None, :], tl.load(stats + 3 * channels + own)[None, :]
    first = tl.zeros([ROWS, COLUMNS], tl.float32)
    second = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(split * ROWS, rows, splits * ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        place, inside = row.to(tl.int64) * columns + column[None, :], row < rows
        value = tl.load(x + place, mask=inside, other=0).to(tl.float32)
        gradient = tl.load(dy + place, mask=inside, other=0).to(tl.float32)
        if READERS > 1:
            gradient += tl.load(dy2 + place, mask=inside, other=0).to(tl.float32)
        if READERS > 2:
            gradient += tl.load(dy3 + place, mask=inside, other=0).to(tl.float32)
        if RELU:
            if ADD:
                gradient = tl.where(tl.load(y + place, mask=inside, other=0) > 0, gradient, 0.0)
            else:
                gradient = tl.where(value * scale + shift > 0, gradient, 0.0)
        if KEEP:
            rounded = gradient.to(g.dtype.element_ty)
            tl.store(g + place, rounded, mask=inside)
            gradient = rounded.to(tl.float32)
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
    g, x, stats, line, dx, rows, columns, channels, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """dx = scale g + slope x + constant; where g was not kept, the ReLU is applied to it here."""
    blocks = columns // COLUMNS
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    channel = column % channels
    scale, shift = tl.load(stats + 2 * channels + channel)[None, :], tl.load(stats + 3 * channels + channel)[None, :]
    slope, constant = tl.load(line + channel), tl.load(line + channels + channel)
    row = (tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS))[:, None]
    place, inside = row.to(tl.int64) * columns + column[None, :], row < rows
    gradient = tl.load(g + place, mask=inside, other=0).to(tl.float32)
    value = tl.load(x + place, mask=inside, other=0).to(tl.float32)
    if RELU:
        gradient = tl.where(value * scale + shift > 0, gradient, 0.0)
    value = gradient * scale + value * slope[None, :] + constant[None, :]
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


def batch_norm_act(
    x: Tensor, residual: Tensor | None, norm: torch.nn.BatchNorm2d, relu: bool, readers: int = 1
) -> tuple[Tensor, ...]:
    """relu(norm(x) + residual) in training: x, residual (B, C, H, W) channels-last. Moves the running statistics.

    Returns the map once for each of at most three readers, whose gradients the backward pass adds.
    """
    buffers = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    maps: tuple[Tensor, ...] = _BatchNormAct.apply(
        x, residual, norm.weight, norm.bias, buffers, norm.momentum, norm.eps, relu, readers
    )
    return maps


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
        readers: int,
    ) -> tuple[Tensor, ...]:
        rows, columns, channels, splits = _layout(x, SUMMED_ROWS)
        blocks = columns // COLUMNS
        partial = x.new_empty(2, splits, columns, dtype=torch.float32)
        stats = x.new_empty(4, channels, dtype=torch.float32)
        launch(_batch_norm_moments, (blocks, splits))(
            x, partial, _counters(x.device), weight, bias, *buffers, stats,
            rows, columns, channels, splits, x.numel() // channels, eps, momentum,
            SUMMED_ROWS, COLUMNS, TERMS, min(channels, COLUMNS), **SUM,
        )  # fmt: skip
        y, add = torch.empty_like(x), residual is not None
        grid = (blocks * triton.cdiv(rows, ROWS),)
        launch(_batch_norm_forward, grid)(
            x, residual if add else x, y, stats, rows, columns, channels, add, relu, ROWS, COLUMNS
        )  # fmt: skip
        ctx.save_for_backward(x, y if add and relu else x, stats)  # elsewhere y is not read
        ctx.set_materialize_grads(False)
        ctx.add, ctx.relu = add, relu
        return (y, *(y.view_as(y) for _ in range(readers - 1)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, y, stats = ctx.saved_tensors
        given = [d.contiguous(memory_format=torch.channels_last) for d in gradients if d is not None]
        if not given:
            return (None,) * 9
        keep = ctx.add or len(given) > 1
        block = SUMMED_GRADIENTS if keep else SUMMED_ROWS
        rows, columns, channels, splits = _layout(x, block)
        blocks = columns // COLUMNS
        partial = x.new_empty(2, splits, columns, dtype=torch.float32)
        dweight, dbias, line = (x.new_empty(n, channels, dtype=torch.float32) for n in (1, 1, 2))
        g = torch.empty_like(x) if keep else given[0]
        launch(_batch_norm_sum_gradient, (blocks, splits))(
            *given, *[x] * (READERS - len(given)), x, y, g, stats, partial, _counters(x.device), dweight, dbias, line,
            rows, columns, channels, splits, x.numel() // channels,
            len(given), ctx.add, ctx.relu, keep, block, COLUMNS, TERMS, min(channels, COLUMNS), **SUM,
        )  # fmt: skip
        dx = torch.empty_like(x)
        grid = (blocks * triton.cdiv(rows, ROWS),)
        launch(_batch_norm_backward, grid)(
            g, x, stats, line, dx, rows, columns, channels, ctx.relu and not keep, ROWS, COLUMNS
        )  # fmt: skip
        return dx, g if ctx.add else None, dweight[0], dbias[0], None, None, None, None, None


@cache
def _counters(device: torch.device) -> Tensor:
    """A zero per block of columns; kernels run one after another and each resets what it counted."""
    return torch.zeros(BLOCKS, dtype=torch.int32, device=device)


def _layout(x: Tensor, block: int) -> tuple[int, int, int, int]:
    """Rows and columns of the matrix, channels, and how many programs share the rows of a block of columns."""
    channels = x.shape[1]
    columns = max(channels, COLUMNS)
    rows = x.numel() // columns
    parts = triton.cdiv(rows, block)
    # The fewest programs that need the same number of iterations.
    turns = triton.cdiv(parts, max(1, PROGRAMS // (columns // COLUMNS)))
    return rows, columns, channels, triton.cdiv(parts, turns)
