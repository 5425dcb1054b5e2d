"""What the strokes of a slice say of its classes as a whole: which of them it has, and how densely each is drawn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pclmix.losses.precision import full


class Known(NamedTuple):
    """What is known of every class at every pixel of a view, each (B, K, H, W) or None."""

    present: Tensor | None = None  #: bool: the slice this pixel comes from has the class
    log_density: Tensor | None = None  #: see `log_density`, of the slice this pixel comes from


def present_classes(strokes: Tensor, classes: int) -> Tensor:
    """(B, K) bool: the classes that are drawn in each slice of `strokes` (B, H, W); all where nothing is drawn."""
    k = torch.arange(classes, device=strokes.device).view(1, -1, 1, 1)
    drawn = (strokes.unsqueeze(1) == k).any(3).any(2)
    return drawn | ~drawn.any(1, keepdim=True)


def only_present(p: Tensor, present: Tensor) -> Tensor:
    """Probabilities (B, K, H, W) with those of absent classes shared out among the `present` (B, K) ones."""
    kept = p * present[..., None, None]
    return kept / kept.sum(1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)


def absent_cross_entropy(logits: Tensor, label: Tensor, present: Tensor) -> Tensor:
    """-log of the probability of the present classes together, summed where nothing is drawn, over the drawn pixels.

    The likelihood of a pixel of which only this is known; divided as equation 3 is, so that a pixel that gives itself
    to an absent class weighs as much as one that is wrong on a stroke. logits: (B, K, H, W). label: (B, H, W).
    present: (B, K, H, W) bool, at least one a pixel. Returns a scalar; 0 where every class is present.
    """
    drawn = label >= 0
    per_pixel = -full(logits).log_softmax(1).masked_fill(~present, -torch.inf).logsumexp(1)
    return per_pixel.masked_fill(drawn, 0).sum() / drawn.sum().clamp(min=1)


def log_density(label: Tensor, q: Tensor, near: Tensor) -> Tensor:
    """(B, K): the log of the share of a class's pixels that is drawn, less the mean over the drawn classes; else 0.

    label: (B, H, W). q: (B, K, H, W), probabilities. Counted are pixels of `near` (B, H, W) bool: the drawn ones by
    their label and the others by q, not differentiated.
    """
    k = torch.arange(q.shape[1], device=label.device).view(1, -1, 1, 1)
    drawn = ((label.unsqueeze(1) == k) & near.unsqueeze(1)).sum((2, 3))
    others = (full(q.detach()) * (near & (label < 0)).unsqueeze(1)).sum((2, 3))
    known = drawn > 0
    log = torch.where(known, (drawn / (drawn + others).clamp(min=1)).clamp(min=1e-12).log(), 0.0)
    mean = log.sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1)
    return torch.where(known, log - mean, 0.0)
