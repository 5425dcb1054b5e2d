"""Gated CRF: pixels that are near and look alike should have one class."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pclmix.losses.precision import full

#: p, image, sigma_xy, sigma_i, radius -> m_i = sum_j k_ij p_j
Filter = Callable[[Tensor, Tensor, float, float, int], Tensor]


def gated_crf(
    p: Tensor,
    image: Tensor,
    sigma_xy: float = 6.0,
    sigma_i: float = 0.1,
    radius: int = 5,
    filtering: Filter | None = None,
) -> Tensor:
    """sum over pairs i, j of k_ij (1 - sum_k p_ik p_jk) / (B H W): the Potts energy of one Gaussian kernel.

    k_ij = exp(-|x_i - x_j|^2 / 2 sigma_xy^2 - |I_i - I_j|^2 / 2 sigma_i^2) for two different pixels of an image that
    lie within `radius` of each other down and across; both (i, j) and (j, i) count.
    p: (B, K, H, W) probabilities. image: (B, C, H, W). Returns a scalar.
    `filtering` computes the messages, `filtered` unless said.
    """
    p = full(p)
    message = (filtering or filtered)(p.detach(), full(image.detach()), sigma_xy, sigma_i, radius)
    # The energy is quadratic in p and k symmetric: its gradient is twice the message, and no pair is kept for it.
    agree = 2 * (p * message).sum() - (p.detach() * message).sum()
    # Probabilities add up to 1, so the message adds up to sum_j k_ij.
    return (message.sum() - agree) / (p.shape[0] * p.shape[2] * p.shape[3])


@torch.no_grad()
def filtered(p: Tensor, image: Tensor, sigma_xy: float, sigma_i: float, radius: int) -> Tensor:
    """m_i = sum_j k_ij p_j, (B, K, H, W), by one pass over the image for each pair of opposite shifts.

    Memory is that of p and of two images, whatever the radius; fused_crf does the same on a GPU.
    """
    height, width = p.shape[-2:]
    message, nothing = torch.zeros_like(p), image.new_zeros(())
    image = image / (math.sqrt(2) * sigma_i)  # so that the exponent is the squared difference itself
    for dy in range(min(radius, height - 1) + 1):
        for dx in range(-min(radius, width - 1), min(radius, width - 1) + 1):
            if dy == 0 and dx <= 0:
                continue  # the pixel itself, and shifts whose opposite is taken
            here = (..., slice(0, height - dy), slice(max(0, -dx), width - max(0, dx)))
            there = (..., slice(dy, height), slice(max(0, dx), width + min(0, dx)))
            difference = image[here] - image[there]
            exponent = torch.addcmul(nothing, difference, difference, value=-1)
            alike = (exponent if image.shape[1] == 1 else exponent.sum(1, keepdim=True)).exp_()
            near = math.exp(-(dy * dy + dx * dx) / (2 * sigma_xy**2))
            message[here].addcmul_(alike, p[there], value=near)
            message[there].addcmul_(alike, p[here], value=near)
    return message
