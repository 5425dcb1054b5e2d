"""Overlap with labels: the soft Dice loss, over labelled pixels only."""

from __future__ import annotations

import torch
from torch import Tensor

from pclmix.losses.precision import full

SMOOTH = 1e-5


def dice_loss(p: Tensor, label: Tensor, smooth: float = SMOOTH) -> Tensor:
    """1 - mean over classes of (2 sum p g + s) / (sum p^2 + sum g^2 + s), sums over the labelled pixels of the batch.

    p: (B, K, H, W) probabilities. label: (B, H, W), IGNORE where nothing is known; g is its one-hot form. With few
    pixels labelled this is the partial Dice. Returns a scalar; 0, with a gradient of zeros, when nothing is labelled.
    """
    p = full(p)
    # IGNORE equals no class, so that g is zero there.
    g = label[:, None] == torch.arange(p.shape[1], device=p.device).view(1, -1, 1, 1)
    known = (label >= 0)[:, None]
    axes = (0, 2, 3)
    both = (p * g).sum(axes)
    size = (p.square() * known).sum(axes) + g.sum(axes)
    return 1 - ((2 * both + smooth) / (size + smooth)).mean()
