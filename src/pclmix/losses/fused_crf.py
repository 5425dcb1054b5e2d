"""The message of the gated CRF on a GPU in one pass: a program has PIXELS pixels of one image and visits its window."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pclmix.rehearsal import launch

PIXELS = 256


@triton.jit
def _filter(
    p, image, out, height, width, inverse_xy, inverse_i,
    RADIUS: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """out_i = sum_j k_ij p_j over the pixels j around i; planes of classes and channels are contiguous."""
    side, size = 2 * RADIUS + 1, height * width
    b = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    y, x, inside = i // width, i % width, i < size
    k = tl.arange(0, PADDED)[:, None]
    total = tl.zeros([PADDED, PIXELS], tl.float32)
    for shift in range(side * side):
        dy, dx = shift // side - RADIUS, shift % side - RADIUS
        there = inside & (y + dy >= 0) & (y + dy < height) & (x + dx >= 0) & (x + dx < width)
        there = there & (dy * dy + dx * dx > 0)
        j = i + dy * width + dx
        exponent = tl.zeros([PIXELS], tl.float32) + (dy * dy + dx * dx) * inverse_xy
        for c in tl.static_range(C):
            plane = image + (b * C + c) * size
            difference = tl.load(plane + i, mask=inside, other=0) - tl.load(plane + j, mask=there, other=0)
            exponent += difference * difference * inverse_i
        weight = tl.where(there, tl.exp(-exponent), 0.0)
        near = tl.load(p + (b * K + k) * size + j[None, :], mask=(k < K) & there[None, :], other=0)
        total += weight[None, :] * near
    tl.store(out + (b * K + k) * size + i[None, :], total, mask=(k < K) & inside[None, :])


def fits(p: Tensor, image: Tensor) -> bool:
    """Both in float32 on the current CUDA device, and few enough classes for a program to hold."""
    ready = p.is_cuda and p.device.index == torch.cuda.current_device() and p.shape[1] <= 16
    return ready and p.dtype == image.dtype == torch.float32


def filtered(p: Tensor, image: Tensor, sigma_xy: float, sigma_i: float, radius: int) -> Tensor:
    """As `gated_crf.filtered`."""
    p, image = p.contiguous(), image.contiguous()
    batch, classes, height, width = p.shape
    out = torch.empty_like(p)
    inverse = (0.5 / sigma_xy**2, 0.5 / sigma_i**2)
    grid, padded = (triton.cdiv(height * width, PIXELS), batch), triton.next_power_of_2(classes)
    launch(_filter, grid)(p, image, out, height, width, *inverse, radius, image.shape[1], classes, padded, PIXELS)
    return out
