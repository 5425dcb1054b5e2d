"""Losses without labels: uncertainty (equations 5 to 7), consistency (9 and 12), Mumford-Shah, gated CRF."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pclmix.kernels.ops import crf_message
from pclmix.labels import IGNORE
from pclmix.losses import full
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


def class_means(p: Tensor, image: Tensor) -> Tensor:
    """c_k, the soft mean of the image in class k, per image and channel.

    p: (B, K, H, W). image: (B, C, H, W). Returns (B, K, C); 0 for a class whose probability is 0 everywhere.
    """
    p, image = full(p), full(image)
    # Broadcast products instead of a matrix product: autocast would round that to bfloat16.
    total = (p.unsqueeze(2) * image.unsqueeze(1)).sum((3, 4))
    return total / p.sum((2, 3)).clamp(min=1e-6).unsqueeze(2)


def piecewise_constant(p: Tensor, image: Tensor) -> Tensor:
    """sum over images, classes, channels and pixels of (I - c_k)^2 p_k. Shapes as in class_means; a scalar.

    c_k minimises this sum, so that the gradient through c_k is zero and is not computed.
    """
    p, image = full(p), full(image)
    c = class_means(p.detach(), image)[..., None, None]
    return ((image.unsqueeze(1) - c).square().sum(2) * p).sum()


def total_variation(p: Tensor) -> Tensor:
    """TV_L1: the sum of absolute differences between neighbours down and across. p: (B, K, H, W); a scalar."""
    p = full(p)
    down = (p[:, :, 1:] - p[:, :, :-1]).abs().sum()
    return down + (p[:, :, :, 1:] - p[:, :, :, :-1]).abs().sum()


def mumford_shah(p: Tensor, image: Tensor) -> Tensor:
    """sum (I - c_k)^2 p_k + TV_L1(p): a sum over the whole batch, which the small weight of the method expects."""
    return piecewise_constant(p, image) + total_variation(p)


def gated_crf(
    p: Tensor,
    image: Tensor,
    sigma_xy: float = 6.0,
    sigma_i: float = 0.1,
    radius: int = 5,
) -> Tensor:
    """sum over pairs i, j of k_ij (1 - sum_k p_ik p_jk) / (B H W): the Potts energy of one Gaussian kernel.

    k_ij = exp(-|x_i - x_j|^2 / 2 sigma_xy^2 - |I_i - I_j|^2 / 2 sigma_i^2) for two different pixels of an image that
    lie within `radius` of each other down and across; both (i, j) and (j, i) count. p: (B, K, H, W) probabilities.
    image: (B, C, H, W). Returns a scalar.
    """
    p = full(p)
    message = crf_message(p.detach(), full(image.detach()), sigma_xy, sigma_i, radius)
    # The energy is quadratic in p and k is symmetric: its gradient is twice the message, and no pair is stored.
    agree = 2 * (p * message).sum() - (p.detach() * message).sum()
    # Probabilities add up to 1, so the message adds up to sum_j k_ij.
    return (message.sum() - agree) / (p.shape[0] * p.shape[2] * p.shape[3])
