"""Pseudo labels of two predictions mixed by a drawn weight (dual-branch networks)."""

from __future__ import annotations

import torch
from torch import Tensor

from pclmix.losses.dice import dice_loss
from pclmix.losses.precision import full


def mixed_pseudo_label(p1: Tensor, p2: Tensor, beta: Tensor) -> Tensor:
    """argmax_k of beta p1 + (1 - beta) p2, not differentiated. p1, p2: (B, K, H, W). beta: 0-dim -> (B, H, W)."""
    return torch.lerp(full(p2.detach()), full(p1.detach()), beta).argmax(1)


def pseudo_supervision(p1: Tensor, p2: Tensor, beta: Tensor) -> Tensor:
    """(Dice(p1, PL) + Dice(p2, PL)) / 2 with PL their mixed pseudo label; a scalar."""
    label = mixed_pseudo_label(p1, p2, beta)
    return (dice_loss(p1, label) + dice_loss(p2, label)) / 2
