"""Terms that need no labels: the Mumford-Shah energy and a gated CRF."""

from __future__ import annotations

from torch import Tensor

from pclmix.kernels.ops import crf_message
from pclmix.losses.precision import full


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
    lie within `radius` of each other down and across; both (i, j) and (j, i) count.
    p: (B, K, H, W) probabilities. image: (B, C, H, W). Returns a scalar.
    """
    p = full(p)
    message = crf_message(p.detach(), full(image.detach()), sigma_xy, sigma_i, radius)
    # The energy is quadratic in p and k is symmetric: its gradient is twice the message, and no pair is stored.
    agree = 2 * (p * message).sum() - (p.detach() * message).sum()
    # Probabilities add up to 1, so the message adds up to sum_j k_ij.
    return (message.sum() - agree) / (p.shape[0] * p.shape[2] * p.shape[3])
