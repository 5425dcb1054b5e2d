"""Supervision by scribbles: cross-entropy where something was drawn (equations 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pclmix.labels import IGNORE
from pclmix.losses.precision import full
from pclmix.soft_label import SoftLabel

#: The share of the transformer branch, lambda_t of the paper.
LAMBDA_T = 0.4


def partial_cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy averaged over scribbled pixels; one branch of equation 3.

    logits: (B, K, H, W). label: (B, H, W), IGNORE where nothing was drawn. Returns a scalar; 0, with a gradient of
    zeros, when nothing was drawn in the whole batch.
    """
    # Summed by us: the mean over no pixels would be NaN.
    per_pixel = F.cross_entropy(full(logits), label, ignore_index=IGNORE, reduction="none")
    return per_pixel.sum() / (label >= 0).sum().clamp(min=1)


def partial_cross_entropy_soft(logits: Tensor, soft: Tensor, mask: Tensor) -> Tensor:
    """-sum_k soft_k log p_k averaged over the pixels of `mask`: equation 3 for labels that were blended.

    logits, soft: (B, K, H, W). mask: (B, H, W) bool, what was scribbled; `soft` elsewhere is not looked at. Returns a
    scalar; 0, with a gradient of zeros, when the mask is empty.
    """
    per_pixel = -(soft * F.log_softmax(full(logits), dim=1)).sum(1)
    return per_pixel.masked_fill(~mask, 0).sum() / mask.sum().clamp(min=1)


def dual_partial_cross_entropy(
    logits_c: Tensor, logits_t: Tensor, label: Tensor | SoftLabel, lambda_t: float = LAMBDA_T
) -> Tensor:
    """Equation 3: (1 - lambda_t) CE(p_c, y) + lambda_t CE(p_t, y) over scribbled pixels.

    logits_c, logits_t: (B, K, H, W) of the CNN and the transformer branch. label: (B, H, W), or a SoftLabel.
    """
    if isinstance(label, SoftLabel):
        soft, mask = label.dense(logits_c.shape[1]), label.mask()
        loss_c = partial_cross_entropy_soft(logits_c, soft, mask)
        loss_t = partial_cross_entropy_soft(logits_t, soft, mask)
    else:
        loss_c = partial_cross_entropy(logits_c, label)
        loss_t = partial_cross_entropy(logits_t, label)
    return (1 - lambda_t) * loss_c + lambda_t * loss_t


def supervised(
    logits_c: Sequence[Tensor],
    logits_t: Sequence[Tensor],
    labels: Sequence[Tensor | SoftLabel],
    lambda_t: float = LAMBDA_T,
) -> Tensor:
    """Equation 4: pCE(x) + pCE(x12) + pCE(x21), a sum over the views, each averaged over its own scribbles.

    Each sequence has one item per view (x, x12, x21): logits (B, K, H, W), labels as in equation 3.
    """
    views = zip(logits_c, logits_t, labels, strict=True)
    return torch.stack([dual_partial_cross_entropy(c, t, y, lambda_t) for c, t, y in views]).sum()
