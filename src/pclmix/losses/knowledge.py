"""What the strokes of a slice say of its classes as a whole: which are there at all, and how densely each is drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from pclmix.losses.precision import full


def present_classes(label: Tensor, classes: int) -> Tensor:
    """(B, K) bool: classes with a stroke in each of `label` (B, H, W); all of them where nothing is drawn."""
    k = torch.arange(classes, device=label.device).view(1, -1, 1, 1)
    drawn = (label.unsqueeze(1) == k).any(3).any(2)
    return drawn | ~drawn.any(1, keepdim=True)


def absent_cross_entropy(logits: Tensor, label: Tensor, present: Tensor) -> Tensor:
    """-log of what a pixel leaves to the classes its slice has, summed where nothing is drawn, over the drawn pixels.

    logits: (B, K, H, W). label: (B, H, W). present: bool, (B, K, H, W) or such that it broadcasts. Returns a scalar.
    """
    drawn = label >= 0
    log_p = full(logits).log_softmax(1)
    per_pixel = -log_p.masked_fill(~present, -torch.inf).logsumexp(1)
    return per_pixel.masked_fill(drawn, 0).sum() / drawn.sum().clamp(min=1)


def log_density(label: Tensor, q: Tensor, near: Tensor) -> Tensor:
    """(B, K): log of the share of each class's pixels that is drawn, less its mean over the classes drawn; else 0.

    The pixels of a class are the drawn ones and, of the others in `near` (B, H, W) bool, as many as `q` (B, K, H, W)
    expects.
    """
    k = torch.arange(q.shape[1], device=label.device).view(1, -1, 1, 1)
    drawn = ((label.unsqueeze(1) == k) & near.unsqueeze(1)).sum((2, 3)).float()
    open_pixels = (full(q) * (near & (label < 0)).unsqueeze(1)).sum((2, 3))
    known = drawn > 0
    log = torch.where(known, drawn.clamp(min=1).log() - (drawn + open_pixels).clamp(min=1).log(), 0.0)
    return torch.where(known, log - log.sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1), 0.0)
