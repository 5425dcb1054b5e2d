"""Uncertainty of both branches together, and the pseudo labels it admits (equations 5 to 7)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pclmix.labels import IGNORE
from pclmix.losses.precision import full
from pclmix.losses.supervised import LAMBDA_T

EPSILON = 1e-6


def mean_prediction(p_c: Tensor, p_t: Tensor, lambda_t: float = LAMBDA_T) -> Tensor:
    """Equation 6: q = (1 - lambda_t) p_c + lambda_t p_t, on probabilities of any one shape."""
    return torch.lerp(full(p_c), full(p_t), lambda_t)


def entropy(q: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Equation 5: u = -sum_k q_k log(q_k + epsilon), natural logarithm. q: (B, K, H, W) -> (B, H, W)."""
    q = full(q)
    return -(q * torch.log(q + epsilon)).sum(1)


def ramp(progress: Tensor, length: float = 1.0) -> Tensor:
    """exp(-5 (1 - t)^2) with t = progress / length, 1 from t = 1 on. progress: 0-dim, t/T of the training."""
    t = (progress / length).clamp(max=1.0)
    return torch.exp(-5 * (1 - t).square())


def entropy_threshold(progress: Tensor) -> Tensor:
    """H of equation 7: (0.75 + 0.25 r) ln 2 with r = exp(-5 (1 - t/T)^2). progress: 0-dim, t/T -> 0-dim."""
    return (0.75 + 0.25 * ramp(progress)) * math.log(2)


def pseudo_label(q: Tensor, label: Tensor, threshold: Tensor) -> Tensor:
    """Equation 7: y on the scribble; else argmax q where u < H; else IGNORE.

    q: (B, K, H, W), not differentiated. label: (B, H, W). threshold: 0-dim H. Returns (B, H, W) int64. Each pixel
    is independent, so q and label may be subsampled (contrast.at_stride) instead of the result.
    """
    q = q.detach()
    confident = q.argmax(1).masked_fill(entropy(q) >= threshold, IGNORE)
    return torch.where(label >= 0, label, confident)
