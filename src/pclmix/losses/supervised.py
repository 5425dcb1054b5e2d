"""Supervision by labels: cross-entropy over scribbled pixels (equations 3 and 4) and soft Dice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pclmix.kernels.collective import common_count
from pclmix.labels import IGNORE
from pclmix.losses import full

#: The share of the transformer branch, lambda_t of the paper.
LAMBDA_T = 0.4
SMOOTH = 1e-5


@dataclass(frozen=True)
class SoftLabel:
    """The label of two blended images: `weight` parts of scribble `a`, the rest of scribble `b`.

    a, b: (B, H, W) with IGNORE where nothing was drawn. weight: (B, 1, 1) in [0, 1].
    """

    a: Tensor
    b: Tensor
    weight: Tensor

    def mask(self) -> Tensor:
        """(B, H, W) bool: scribbled in at least one of the two."""
        return (self.a >= 0) | (self.b >= 0)

    def dense(self, classes: int) -> Tensor:
        """(B, K, H, W): `weight` on the class of `a` and 1 - `weight` on that of `b`, each only where it is drawn.

        A pixel drawn in one of the two has only that weight; a pixel drawn in neither has zeros.
        """
        k = torch.arange(classes, device=self.a.device).view(1, -1, 1, 1)
        # IGNORE equals no class, so pixels that were not drawn get nothing.
        weight = self.weight.unsqueeze(1)
        return weight * (self.a.unsqueeze(1) == k) + (1 - weight) * (self.b.unsqueeze(1) == k)


def partial_cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy averaged over scribbled pixels, of all ranks where there are several; one branch of equation 3.

    logits: (B, K, H, W). label: (B, H, W), IGNORE where nothing was drawn. Returns a scalar; 0, with a gradient of
    zeros, when nothing was drawn in the whole batch.
    """
    # Not cross_entropy's own mean: NaN over no pixels, and it counts only this rank's pixels.
    per_pixel = F.cross_entropy(full(logits), label, ignore_index=IGNORE, reduction="none")
    return per_pixel.sum() / common_count((label >= 0).sum())


def partial_cross_entropy_soft(logits: Tensor, soft: Tensor, mask: Tensor) -> Tensor:
    """-sum_k soft_k log p_k averaged over the pixels of `mask`: equation 3 for labels that were blended.

    logits, soft: (B, K, H, W). mask: (B, H, W) bool, the scribbled pixels; `soft` is ignored elsewhere. Returns a
    scalar; 0, with a gradient of zeros, when the mask is empty.
    """
    per_pixel = -(soft * F.log_softmax(full(logits), dim=1)).sum(1)
    return per_pixel.masked_fill(~mask, 0).sum() / common_count(mask.sum())


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
