"""Losses over pixels: the pixel terms of PCLMix in two passes over the logits, the message of the gated CRF in one.

Pixel terms: one pass sums, one writes both gradients and computes the probabilities again instead of storing them.
Each program has PIXELS pixels of one image; its sums are a column of `partial`, added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pclmix.kernels import launch
from pclmix.kernels.collective import common_count

PIXELS = 512
_TINY = torch.finfo(torch.float32).eps ** 2  # as negative_cosine
CRF_PIXELS = 256


@triton.jit
def _log_probabilities(logits, image, pixel, k, K: tl.constexpr, PLACE: tl.constexpr, CLASS: tl.constexpr, SIZE):
    """(PIXELS, K), -inf beyond the last class; PLACE and CLASS are the strides of pixels and of classes."""
    place = image.to(tl.int64) * SIZE * K + pixel * PLACE + k * CLASS
    value = tl.load(logits + place, mask=k < K, other=float("-inf")).to(tl.float32)
    value -= tl.max(value, 1)[:, None]
    return value - tl.log(tl.sum(tl.exp(value), 1))[:, None]


@triton.jit
def _load_target(targets, image, pixel, k, batch, K: tl.constexpr, SIZE):
    """Of images of the second and third view: (PIXELS, K), classes outermost in memory."""
    place = (image - batch).to(tl.int64) * SIZE * K + pixel + k * SIZE
    target = tl.load(targets + place, mask=k < K, other=0)
    return target, tl.sum(target * target, 1)


@triton.jit(do_not_specialize=["batch"])
def _pixel_terms_sum(
    logits_c, logits_t, labels, targets, partial, batch, lambda_t, SIZE,
    PLACE_C: tl.constexpr, CLASS_C: tl.constexpr, PLACE_T: tl.constexpr, CLASS_T: tl.constexpr,
    K: tl.constexpr, PADDED: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Sums over a block of pixels: both cross-entropies, scribbled pixels, (p_c - p_t)^2; <p, q>, |p|^2, |q|^2."""
    image, blocks = tl.program_id(0), tl.num_programs(1)
    pixel = (tl.program_id(1) * PIXELS + tl.arange(0, PIXELS))[:, None]
    k = tl.arange(0, PADDED)[None, :]
    log_c = _log_probabilities(logits_c, image, pixel, k, K, PLACE_C, CLASS_C, SIZE)
    log_t = _log_probabilities(logits_t, image, pixel, k, K, PLACE_T, CLASS_T, SIZE)
    label = tl.load(labels + image.to(tl.int64) * SIZE + pixel)
    out, step = partial + image * blocks + tl.program_id(1), tl.num_programs(0) * blocks
    tl.store(out, -tl.sum(tl.sum(tl.where(k == label, log_c, 0.0), 1), 0))
    tl.store(out + step, -tl.sum(tl.sum(tl.where(k == label, log_t, 0.0), 1), 0))
    tl.store(out + 2 * step, tl.sum(tl.sum((label >= 0).to(tl.float32), 1), 0))
    p_c, p_t = tl.exp(log_c), tl.exp(log_t)
    tl.store(out + 3 * step, tl.sum(tl.sum((p_c - p_t) * (p_c - p_t), 1), 0))
    if image >= batch:
        q = p_c + lambda_t * (p_t - p_c)
        target, p2 = _load_target(targets, image, pixel, k, batch, K, SIZE)
        tl.store(out + 4 * step, tl.sum(tl.sum(target * q, 1), 0))
        tl.store(out + 5 * step, tl.sum(p2, 0))
        tl.store(out + 6 * step, tl.sum(tl.where(p2 > 0, tl.sum(q * q, 1), 0.0), 0))


@triton.jit(do_not_specialize=["batch"])
def _pixel_terms_backward(
    logits_c, logits_t, labels, targets, factors, dlogits_c, dlogits_t, batch, lambda_t, SIZE,
    PLACE_C: tl.constexpr, CLASS_C: tl.constexpr, PLACE_T: tl.constexpr, CLASS_T: tl.constexpr,
    K: tl.constexpr, PADDED: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Gradients of both logits from the factors (5, 3B) that the pixels of an image share."""
    image, images = tl.program_id(0), tl.num_programs(0)
    pixel = (tl.program_id(1) * PIXELS + tl.arange(0, PIXELS))[:, None]
    k = tl.arange(0, PADDED)[None, :]
    p_c = tl.exp(_log_probabilities(logits_c, image, pixel, k, K, PLACE_C, CLASS_C, SIZE))
    p_t = tl.exp(_log_probabilities(logits_t, image, pixel, k, K, PLACE_T, CLASS_T, SIZE))
    het = tl.load(factors + 2 * images + image)
    dp_c = het * (p_c - p_t)
    dp_t = -dp_c
    if image >= batch:
        q = p_c + lambda_t * (p_t - p_c)
        target, p2 = _load_target(targets, image, pixel, k, batch, K, SIZE)
        along = tl.where(p2 > 0, tl.load(factors + 4 * images + image), 0.0)[:, None]
        dq = tl.load(factors + 3 * images + image) * target + along * q
        dp_c += (1 - lambda_t) * dq
        dp_t += lambda_t * dq
    dl_c = p_c * (dp_c - tl.sum(p_c * dp_c, 1)[:, None])
    dl_t = p_t * (dp_t - tl.sum(p_t * dp_t, 1)[:, None])
    label = tl.load(labels + image.to(tl.int64) * SIZE + pixel)
    one, drawn = (k == label).to(tl.float32), (label >= 0).to(tl.float32)
    dl_c += tl.load(factors + image) * drawn * (p_c - one)
    dl_t += tl.load(factors + images + image) * drawn * (p_t - one)
    first = image.to(tl.int64) * SIZE * K
    tl.store(dlogits_c + first + pixel * PLACE_C + k * CLASS_C, dl_c.to(dlogits_c.dtype.element_ty), mask=k < K)
    tl.store(dlogits_t + first + pixel * PLACE_T + k * CLASS_T, dl_t.to(dlogits_t.dtype.element_ty), mask=k < K)


def pixel_terms_fit(logits_c: Tensor, logits_t: Tensor) -> bool:
    """Whole blocks of pixels, and each image's logits in one piece with classes either outermost or innermost."""
    whole = logits_c.shape[2] * logits_c.shape[3] % PIXELS == 0
    return whole and _strides(logits_c) is not None and _strides(logits_t) is not None


def _strides(logits: Tensor) -> tuple[int, int] | None:
    """Of pixels and of classes."""
    if logits.is_contiguous():
        return 1, logits.shape[2] * logits.shape[3]
    return (logits.shape[1], 1) if logits.is_contiguous(memory_format=torch.channels_last) else None


def pixel_terms(
    logits_c: Tensor,
    logits_t: Tensor,
    labels: Sequence[Tensor],
    targets: tuple[Tensor, Tensor],
    lambda_sup: float,
    lambda_t: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """methods.pclmix.pixel_terms for labels that are not blended: equations 3, 4, 6, 9 and 12."""
    sup, het, mix = _PixelTerms.apply(
        logits_c, logits_t, torch.cat(list(labels)), torch.cat(targets).float(), lambda_sup, lambda_t
    )
    return sup, het, mix


class _PixelTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, c: Tensor, t: Tensor, labels: Tensor, targets: Tensor, lambda_sup: float, lambda_t: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        images, _, height, width = c.shape
        ctx.lambda_sup, ctx.lambda_t = lambda_sup, lambda_t
        grid, sizes = _layout(c, t)
        labels, targets = labels.contiguous(), targets.contiguous()
        partial = torch.zeros(7, *grid, device=c.device)  # the first view has no target: the last three stay zero
        launch(_pixel_terms_sum, grid)(c, t, labels, targets, partial, images // 3, lambda_t, height * width, *sizes)
        ce_c, ce_t, drawn, squares, dot, p2, q2 = partial.sum(2).view(7, 3, -1)
        count = common_count(drawn.sum(1))
        sup = (((1 - lambda_sup) * ce_c.sum(1) + lambda_sup * ce_t.sum(1)) / count).sum()
        norms = p2 * q2
        cosine = dot * norms.clamp(min=_TINY).rsqrt()
        ctx.save_for_backward(c, t, labels, targets, count, dot, p2, norms)
        return sup, squares.sum() / c[: images // 3].numel(), -cosine.sum() * 3 / images

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        c, t, labels, targets, count, dot, p2, norms = ctx.saved_tensors
        images, _, height, width = c.shape
        sup, het, mix = gradients
        view = (sup / count)[:, None].expand_as(norms)
        each, length = mix * 3 / images, norms.clamp(min=_TINY).rsqrt()
        # -d cos / dq = q <p, q> |p|^2 / n^(3/2) - p / n^(1/2), n = |p|^2 |q|^2; below the clamp n does not move.
        along = (each * dot * p2 * length**3).masked_fill(norms < _TINY, 0)
        equal = (het * 2 / c[: images // 3].numel()).expand_as(norms)
        shares = ((1 - ctx.lambda_sup) * view, ctx.lambda_sup * view)
        factors = torch.stack([*shares, equal, -each * length, along])
        grid, sizes = _layout(c, t)
        dc, dt = torch.empty_like(c), torch.empty_like(t)
        launch(_pixel_terms_backward, grid)(
            c, t, labels, targets, factors, dc, dt, images // 3, ctx.lambda_t, height * width, *sizes
        )
        return dc, dt, None, None, None, None


def _layout(c: Tensor, t: Tensor) -> tuple[tuple[int, int], tuple[int, ...]]:
    """The grid; strides, classes, classes padded to a power of two, and pixels of a block."""
    images, classes, height, width = c.shape
    strides = [_strides(c), _strides(t)]
    assert strides[0] is not None
    assert strides[1] is not None
    return (images, height * width // PIXELS), (
        *strides[0], *strides[1], classes, triton.next_power_of_2(classes), PIXELS
    )  # fmt: skip


@triton.jit
def _filter(
    p, image, out, height, width, inverse_xy, inverse_i,
    RADIUS: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, CRF_PIXELS: tl.constexpr,
):  # fmt: skip
    """out_i = sum_j k_ij p_j over the pixels j around i; planes of classes and channels are contiguous."""
    side, size = 2 * RADIUS + 1, height * width
    b = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * CRF_PIXELS + tl.arange(0, CRF_PIXELS)
    y, x, inside = i // width, i % width, i < size
    k = tl.arange(0, PADDED)[:, None]
    total = tl.zeros([PADDED, CRF_PIXELS], tl.float32)
    for shift in range(side * side):
        dy, dx = shift // side - RADIUS, shift % side - RADIUS
        there = inside & (y + dy >= 0) & (y + dy < height) & (x + dx >= 0) & (x + dx < width)
        there = there & (dy * dy + dx * dx > 0)
        j = i + dy * width + dx
        exponent = tl.zeros([CRF_PIXELS], tl.float32) + (dy * dy + dx * dx) * inverse_xy
        for c in tl.static_range(C):
            plane = image + (b * C + c) * size
            difference = tl.load(plane + i, mask=inside, other=0) - tl.load(plane + j, mask=there, other=0)
            exponent += difference * difference * inverse_i
        weight = tl.where(there, tl.exp(-exponent), 0.0)
        near = tl.load(p + (b * K + k) * size + j[None, :], mask=(k < K) & there[None, :], other=0)
        total += weight[None, :] * near
    tl.store(out + (b * K + k) * size + i[None, :], total, mask=(k < K) & inside[None, :])


def crf_fits(p: Tensor) -> bool:
    """Few enough classes for a program to hold."""
    return p.shape[1] <= 16


def crf_message(p: Tensor, image: Tensor, sigma_xy: float, sigma_i: float, radius: int) -> Tensor:
    """As ops.crf_message."""
    p, image = p.contiguous(), image.contiguous()
    batch, classes, height, width = p.shape
    out = torch.empty_like(p)
    inverse = (0.5 / sigma_xy**2, 0.5 / sigma_i**2)
    grid, padded = (triton.cdiv(height * width, CRF_PIXELS), batch), triton.next_power_of_2(classes)
    launch(_filter, grid)(p, image, out, height, width, *inverse, radius, image.shape[1], classes, padded, CRF_PIXELS)
    return out
