"""Scores of the pixels under a coarse pixel, each divided by its own length, to their places in the fine map.

logits[4y + i, 4x + j] = scores[y, x, (i, j)] / sqrt(norms[y, x, (i, j)] / C + eps) + bias: one pass each way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pclmix.rehearsal import launch

PIXELS = 64  # of the coarse map, of one program


@triton.jit
def _places(pixel, i, width, K: tl.constexpr, PADDED: tl.constexpr, FACTOR: tl.constexpr):
    """Of the fine pixels (i, 0), (i, 1), ... of coarse ones: in scores and in the logits; and k."""
    j, k = tl.arange(0, FACTOR)[None, :, None], tl.arange(0, PADDED)[None, None, :]
    pixel = pixel[:, None, None]
    row, column = pixel // width * FACTOR + i, pixel % width * FACTOR + j
    source = (pixel.to(tl.int64) * FACTOR + i) * FACTOR + j
    return source * K + k, (row.to(tl.int64) * width * FACTOR + column) * K + k, k


@triton.jit
def _scale(norms, pixel, i, pixels, channels, eps, FACTOR: tl.constexpr):
    """1 / sqrt(norms / C + eps), norms (S, pixels), and where these norms lie."""
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
