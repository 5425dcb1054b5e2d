"""Agreement between the two branches, and between mixing before and after the network (equations 9, 12, 13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pclmix.losses.precision import full

#: What one cosine runs over: all classes and pixels of an image, or the classes of a pixel.
Axis = Literal["image", "pixel"]

#: The weight of the mixed consistency, lambda_mix of the paper.
LAMBDA_MIX = 1.0


def heterogeneous(p_c: Sequence[Tensor], p_t: Sequence[Tensor]) -> Tensor:
    """Equation 9: MSE(p_c, p_t) + MSE(p_c12, p_t12) + MSE(p_c21, p_t21), on probabilities.

    One item per view (x, x12, x21), each (B, K, H, W). The gradient reaches both branches.
    """
    return torch.stack([F.mse_loss(full(c), full(t)) for c, t in zip(p_c, p_t, strict=True)]).sum()


def negative_cosine(target: Tensor, q: Tensor, axis: Axis = "image") -> Tensor:
    """ncs of equation 12: -cos(target, q), in [-1, 0] for probabilities. The target is not differentiated.

    target, q: (B, K, H, W). axis "image": one cosine over K, H and W, then the mean over images. axis "pixel": one
    cosine over K, then the mean over pixels. A pixel whose target is all zeros (an erased one) has nothing to agree
    with and is left out of both; 0, with a gradient of zeros, when all are.
    """
    p, q = full(target.detach()), full(q)
    # Reduced over classes first: one code for both axes and for any memory layout.
    dot, p2, q2 = (p * q).sum(1), p.square().sum(1), q.square().sum(1)
    known = p2 > 0
    tiny = torch.finfo(q.dtype).eps ** 2
    if axis == "pixel":
        # Clamped before the root, whose slope at 0 is infinite.
        cosine = dot / (p2 * q2).clamp(min=tiny).sqrt()
        return -cosine.masked_fill(~known, 0).sum() / known.sum().clamp(min=1)
    norms = p2.sum((1, 2)) * q2.masked_fill(~known, 0).sum((1, 2))
    return -(dot.sum((1, 2)) / norms.clamp(min=tiny).sqrt()).mean()


def mixed(p12: Tensor, q12: Tensor, p21: Tensor, q21: Tensor, axis: Axis = "image") -> Tensor:
    """Equation 12: ncs(p12, q12) + ncs(p21, q21), what holds F(M(x1, x2)) to M(F(x1), F(x2)) (equations 10 and 11).

    p12, p21: the mixed predictions, targets. q12, q21: equation 6 on the mixed images. All (B, K, H, W).
    """
    return negative_cosine(p12, q12, axis) + negative_cosine(p21, q21, axis)


def con(het: Tensor, mix: Tensor, lambda_mix: float = LAMBDA_MIX) -> Tensor:
    """Equation 13: het + lambda_mix mix."""
    return het + lambda_mix * mix
