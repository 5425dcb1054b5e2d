"""The operations that have kernels, defined in plain torch. Networks and losses call these functions.

Each runs its kernels if they are usable and fit the shapes, else the plain definition. Two further operations choose
in their own modules: window attention (nets/swin.py) and the pixel terms of PCLMix (methods/pclmix.py).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pclmix.kernels import channels_last, usable


def norm_act(norm: nn.Module, x: Tensor, residual: Tensor | None = None, relu: bool = True) -> Tensor:
    """relu(norm(x) + residual), (B, C, H, W). The kernels take a BatchNorm2d in training."""
    return norm_act_for(1, norm, x, residual, relu)[0]


def norm_act_for(
    readers: int, norm: nn.Module, x: Tensor, residual: Tensor | None = None, relu: bool = True
) -> tuple[Tensor, ...]:
    """The result of norm_act for each of at most three readers; the kernels add the readers' gradients as well."""
    if type(norm) is nn.BatchNorm2d and norm.training and usable("batchnorm", x, residual):
        from pclmix.kernels import batchnorm

        tracked = norm.affine and norm.track_running_stats and norm.momentum is not None
        if tracked and channels_last(x, residual) and batchnorm.fits(x):
            return batchnorm.batch_norm_act(x, residual, norm, relu, readers)
    y: Tensor = norm(x)
    if residual is not None:
        y += residual
    return (F.relu_(y) if relu else y,) * readers


def fork(x: Tensor, *counts: int) -> tuple[Tensor, ...]:
    """The first `count` images of x (B, C, H, W) for each of at most three readers; kernels add their gradients."""
    if x.requires_grad and usable("fork", x) and channels_last(x):
        from pclmix.kernels import maps

        return maps.fork(x, counts)
    return tuple(x if count == len(x) else x[:count] for count in counts)


def upsample_concat(x: Tensor, skip: Tensor | None) -> Tensor:
    """x (B, C, H, W) with every pixel repeated 2 x 2, and the skip (B, S, 2H, 2W), if any, as more channels."""
    if usable("upsample", x, skip) and channels_last(x, skip):
        from pclmix.kernels import maps

        if maps.upsample_fits(x, skip):
            return maps.upsample_concat(x, skip)
    # Repeating pixels is exact in any type; autocast would use float32.
    with torch.autocast(x.device.type, enabled=False):
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
    return x if skip is None else torch.cat([x, skip], dim=1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., I), weight (O, I), bias (O) to (..., O); the kernels compute the gradient of the bias."""
    if bias is not None and usable("linear", x, weight, bias):
        from pclmix.kernels import transformer as kernels

        if kernels.linear_fits(weight):
            return kernels.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def residual_norm(x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + branch, or x alone, and its LayerNorm over the last axis; both (..., C) in the type of x.

    weight, bias: (C) in float32. LayerNorm sums in float32 whatever its input, so only its output is rounded; autocast
    would run it in float32, on maps of twice the size.
    """
    if usable("layernorm", x, branch) and weight.dtype == torch.float32:
        from pclmix.kernels import transformer as kernels

        if kernels.norm_fits(weight):
            return kernels.residual_norm(x, branch, weight, bias, eps)
    x = x if branch is None else x + branch
    with torch.autocast(x.device.type, enabled=False):
        return x, F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)


def squared_norms(x: Tensor, matrices: Tensor) -> Tensor:
    """|E_s x|^2 of each pixel x of a map (B, H, W, C) and each matrix of (S, C, C): (B, H, W, S)."""
    if usable("squared_norm", x):
        from pclmix.kernels import maps

        if maps.norms_fit(matrices):
            return maps.squared_norms(x, matrices)
    products = F.linear(x, matrices.flatten(0, 1)).view(*x.shape[:3], -1, x.shape[3])
    with torch.autocast(x.device.type, enabled=False):
        norms: Tensor = torch.linalg.vector_norm(products, dim=-1).to(matrices.dtype)
    return norms.square()


def place_logits(scores: Tensor, norms: Tensor, bias: Tensor, channels: int, eps: float) -> Tensor:
    """scores / sqrt(norms / channels + eps) + bias at their places in a map f times as fine, in float32.

    scores: (B, H, W, f * f * K), for each pixel those of its f x f finer ones. norms: (B, H, W, f * f). bias: (K).
    Returns (B, K, fH, fW).
    """
    if usable("logits", scores) and norms.dtype == torch.float32:
        from pclmix.kernels import maps

        return maps.place_logits(scores, norms, bias, channels, eps)
    batch, height, width, places = norms.shape
    factor = math.isqrt(places)
    scores = scores.view(*norms.shape, -1)
    with torch.autocast(scores.device.type, enabled=False):
        logits = scores * torch.rsqrt(norms.unsqueeze(-1) / channels + eps) + bias
    # One copy permutes to the axes that the losses need.
    logits = logits.view(batch, height, width, factor, factor, -1).permute(0, 5, 1, 3, 2, 4)
    return logits.reshape(batch, -1, height * factor, width * factor)


@torch.no_grad()
def crf_message(p: Tensor, image: Tensor, sigma_xy: float, sigma_i: float, radius: int) -> Tensor:
    """m_i = sum_j k_ij p_j, (B, K, H, W), over the pixels j within `radius` of i; k as in losses.gated_crf.

    p: (B, K, H, W). image: (B, C, H, W). Memory is that of p and of two images, whatever the radius.
    """
    if usable("losses", p, image, dtype=torch.float32):
        from pclmix.kernels import losses

        if losses.crf_fits(p):
            return losses.crf_message(p, image, sigma_xy, sigma_i, radius)
    height, width = p.shape[-2:]
    message, nothing = torch.zeros_like(p), image.new_zeros(())
    image = image / (math.sqrt(2) * sigma_i)  # so that the exponent is the squared difference itself
    for dy in range(min(radius, height - 1) + 1):
        for dx in range(-min(radius, width - 1), min(radius, width - 1) + 1):
            if dy == 0 and dx <= 0:
                continue  # the pixel itself, and shifts whose opposite is taken
            here = (..., slice(0, height - dy), slice(max(0, -dx), width - max(0, dx)))
            there = (..., slice(dy, height), slice(max(0, dx), width + min(0, dx)))
            difference = image[here] - image[there]
            exponent = torch.addcmul(nothing, difference, difference, value=-1)
            alike = (exponent if image.shape[1] == 1 else exponent.sum(1, keepdim=True)).exp_()
            near = math.exp(-(dy * dy + dx * dx) / (2 * sigma_xy**2))
            message[here].addcmul_(alike, p[there], value=near)
            message[there].addcmul_(alike, p[here], value=near)
    return message
