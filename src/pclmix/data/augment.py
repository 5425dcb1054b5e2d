"""Augmentation of whole batches, on whatever device they are: one drawn map per image, shared with its labels.

Fixed shapes and no host synchronisation, so that it can be part of a captured graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    pinch = draw_pinch(label[:, 0], config.pinch, generator) if config.pinch > 0 else None
    image, label = warp(image, label, theta, pinch)
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


@dataclass(frozen=True)
class Pinch:
    """Around a point of each image things shrink (strength > 0) or grow; at the radius and beyond nothing changes."""

    centre: Tensor  #: (B, 2), x and y in normalised coordinates of the image
    strength: Tensor  #: (B,), -1 < s < 3; at the centre lengths become 1 / (1 + s) of what they were
    radius: Tensor  #: (B,), in pixels

    def __call__(self, grid: Tensor) -> Tensor:
        """Points (B, H, W, 2) to where they come from: r -> r (1 + s (1 - r / R)^2), which never folds."""
        height, width = grid.shape[1:3]
        across, down = grid[..., 0] - self.centre[:, 0, None, None], grid[..., 1] - self.centre[:, 1, None, None]
        distance = torch.hypot(across * (width / 2), down * (height / 2))
        inside = (1 - distance / self.radius[:, None, None]).clamp(min=0)
        factor = self.strength[:, None, None] * inside.square()
        return grid + torch.stack([across * factor, down * factor], dim=-1)


def draw_pinch(label: Tensor, log_range: float, generator: Generator) -> Pinch:
    """A pinch around a random stroke pixel of a structure, label > 0, of each (B, H, W); none where there is none.

    1 + s is drawn log-uniformly up to exp(log_range) either way, the radius from 0.08 to 0.3 of the shorter side.
    """
    count, height, width = label.shape
    draw = torch.rand(label.shape, generator=generator, device=generator.device)
    score = torch.where(label > 0, draw, -1.0).flatten(1)
    best, place = score.max(1)
    centre = torch.stack([(place % width + 0.5) * (2 / width) - 1, (place // width + 0.5) * (2 / height) - 1], dim=1)
    log, size = torch.rand(2, count, generator=generator, device=generator.device)
    strength = torch.where(best >= 0, torch.exp((2 * log - 1) * log_range) - 1, 0.0)
    return Pinch(centre, strength, (0.08 + 0.22 * size) * min(height, width))


def warp(image: Tensor, label: Tensor, theta: Tensor, pinch: Pinch | None = None) -> tuple[Tensor, Tensor]:
    """Resample both by `theta`, after `pinch`: image linear with zeros outside, labels nearest with IGNORE outside."""
    grid = F.affine_grid(theta, [image.shape[0], 1, *image.shape[-2:]], align_corners=False)
    if pinch is not None:
        grid = pinch(grid)
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
