"""Augmentation of whole batches, on whatever device they are: one drawn affine per image, shared with its labels.

Fixed shapes and no host synchronisation, so that it can be part of a captured graph.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from pclmix.config import Augment
from pclmix.labels import IGNORE


def augment(image: Tensor, label: Tensor, config: Augment, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Image (B, C, H, W) and labels (B, M, H, W) under the same drawn transforms; labels are filled with IGNORE.

    The third result is the affine maps (B, 2, 3) that were drawn.
    """
    theta = draw_affine(image.shape[0], (image.shape[-2], image.shape[-1]), config, generator)
    image, label = warp(image, label, theta)
    return intensity(image, config, generator), label, theta


def draw_affine(count: int, size: tuple[int, int], config: Augment, generator: Generator) -> Tensor:
    """Affine maps (B, 2, 3) from output to input in normalised coordinates.

    With probability `quarter_turns` a random quarter turn and flip, else with probability `rotate` a rotation within
    `degrees`; zoom and shift on top. On images that are not square quarter turns become half turns.
    """

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator, device=generator.device)

    h, w = size
    turned = uniform(0, 1) < config.quarter_turns
    tilted = ~turned & (uniform(0, 1) < config.rotate)
    quarters = torch.floor(uniform(0, 4)).clamp_(max=3)
    if h != w:
        quarters = 2 * torch.floor(quarters / 2)
    # Quarter turns from exact sines, so that they move pixels and do not interpolate them.
    quarter_sin = (quarters == 1).float() - (quarters == 3).float()
    quarter_cos = (quarters == 0).float() - (quarters == 2).float()
    angle = uniform(-1, 1) * math.radians(config.degrees) * tilted
    sin = torch.where(turned, quarter_sin, torch.sin(angle))
    cos = torch.where(turned, quarter_cos, torch.cos(angle))
    flip = 1 - 2 * ((uniform(0, 1) < 0.5) & turned).float()
    zoom = 1 / uniform(1 - config.scale, 1 + config.scale)
    dx, dy = (2 * uniform(-config.shift, config.shift) for _ in range(2))
    aspect = h / w
    rows = [cos * zoom * flip, -sin * zoom * aspect, dx, sin * zoom * flip / aspect, cos * zoom, dy]
    return torch.stack(rows, dim=1).view(count, 2, 3)


def warp(image: Tensor, label: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Resample both by `theta`: image linear with zeros outside, labels nearest with IGNORE outside."""
    grid = F.affine_grid(theta, [image.shape[0], 1, *image.shape[-2:]], align_corners=False)
    image = F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    # Shifted by IGNORE, the value that grid_sample fills with, zero, is "nothing drawn".
    moved = F.grid_sample((label - IGNORE).to(image.dtype), grid, mode="nearest", align_corners=False)
    return image, moved.round().to(label.dtype) + IGNORE


def intensity(image: Tensor, config: Augment, generator: Generator) -> Tensor:
    """Gamma, contrast, brightness and noise, drawn per image; the result stays in [0, 1]."""
    if config.gamma == 0 and config.contrast == 0 and config.noise == 0:
        return image

    def uniform(low: float, high: float) -> Tensor:
        draw = torch.rand(image.shape[0], 1, 1, 1, generator=generator, device=image.device)
        return low + (high - low) * draw

    if config.gamma > 0:
        image = image.clamp(0, 1).pow(torch.exp(uniform(-config.gamma, config.gamma)))
    if config.contrast > 0:
        centre = image.mean(dim=(-2, -1), keepdim=True)
        factor = 1 + uniform(-config.contrast, config.contrast)
        image = (image - centre) * factor + centre + uniform(-config.contrast, config.contrast) * 0.5
    if config.noise > 0:
        drawn = torch.randn(image.shape, generator=generator, device=image.device, dtype=image.dtype)
        image = image + uniform(0, config.noise) * drawn
    return image.clamp(0, 1)
