"""Consistency of predictions: between branches, under mixing (equations 9 and 12), and with a mean teacher."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pclmix.losses.precision import full


def heterogeneous(p_c: Sequence[Tensor], p_t: Sequence[Tensor]) -> Tensor:
    """Equation 9: MSE(p_c, p_t) + MSE(p_c12, p_t12) + MSE(p_c21, p_t21), on probabilities.

    One item per view (x, x12, x21), each (B, K, H, W). The gradient reaches both branches.
    """
    return torch.stack([F.mse_loss(full(c), full(t)) for c, t in zip(p_c, p_t, strict=True)]).sum()


def negative_cosine(target: Tensor, q: Tensor) -> Tensor:
    """ncs of equation 12: -cos(target, q), in [-1, 0] for probabilities. The target is not differentiated.

    target, q: (B, K, H, W). One cosine over K, H and W of each image, then the mean over images. A pixel whose target
    is all zeros (an erased one) has nothing to agree with and is left out; 0, with a gradient of zeros, when all are.
    """
    p, q = full(target.detach()), full(q)
    # Reduced over classes first, which is as fast in any memory layout.
    dot, p2, q2 = (p * q).sum(1), p.square().sum(1), q.square().sum(1)
    norms = p2.sum((1, 2)) * q2.masked_fill(p2 <= 0, 0).sum((1, 2))
    tiny = torch.finfo(q.dtype).eps ** 2  # clamped before the root, whose slope at 0 is infinite
    return -(dot.sum((1, 2)) / norms.clamp(min=tiny).sqrt()).mean()


def mixed(p12: Tensor, q12: Tensor, p21: Tensor, q21: Tensor) -> Tensor:
    """Equation 12: ncs(p12, q12) + ncs(p21, q21), least where F(M(x1, x2)) = M(F(x1), F(x2)) (equations 10 and 11).

    p12, p21: the mixed predictions, targets. q12, q21: equation 6 on the mixed images. All (B, K, H, W).
    """
    return negative_cosine(p12, q12) + negative_cosine(p21, q21)


def confident_mse(p: Tensor, target: Tensor, uncertainty: Tensor, threshold: Tensor) -> Tensor:
    """Squared error of probabilities, averaged over classes and over the pixels with uncertainty < threshold.

    p, target: (B, K, H, W), the target not differentiated. uncertainty: (B, H, W). threshold: 0-dim. Returns a
    scalar; 0, with a gradient of zeros, where no pixel is certain.
    """
    sure = uncertainty < threshold
    distance = (full(p) - full(target.detach())).square().mean(1)
    return distance.masked_fill(~sure, 0).sum() / sure.sum().clamp(min=1)


@torch.no_grad()
def follow(teacher: Sequence[Tensor], student: Sequence[Tensor], updates: Tensor, decay: float) -> None:
    """teacher = d teacher + (1 - d) student in place, d = min(decay, 1 - 1 / (n + 1)) after n earlier updates.

    updates: 0-dim n, incremented here. The first update copies the student, so that the initial weights do not count.
    """
    step = torch.maximum(1 / (updates + 1.0), torch.full_like(updates, 1 - decay, dtype=torch.float32))
    difference = torch._foreach_sub(list(student), list(teacher))
    torch._foreach_mul_(difference, step)
    torch._foreach_add_(list(teacher), difference)
    updates.add_(1)
