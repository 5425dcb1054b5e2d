"""A batch on its device: what a method sees, mixed annotations, the stroke habit `ring`, augmentation.

Shapes are fixed and nothing waits for the host, so that a training step can be captured as one graph. Labels change
before any loss sees them, so that every method respects it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from pclmix.config import Augment
from pclmix.data.store import Store
from pclmix.labels import IGNORE


@dataclass(frozen=True)
class Batch:
    """Images (B, C, H, W) in [0, 1], labels (B, H, W) with IGNORE, and where the slices come from."""

    image: Tensor
    label: Tensor
    index: Tensor  #: (B,) position of each slice in the training store
    maps: Mapping[str, Tensor] = field(default_factory=dict)  #: the method's own label maps, each (B, H, W)
    theta: Tensor | None = None  #: (B, 2, 3) the affine map of each image's augmentation, output to input; None: none


#: Weight of a slice with a dense mask, in scribbled slices. With all of its pixels it would weigh as much as fifty
#: scribbled slices, and the dense cases would dominate the loss.
WORTH = 8.0


@dataclass(frozen=True)
class Mixed:
    """Which labels of each slice of a store may be used."""

    keep: Tensor  #: (N,) share of the labelled pixels drawn in a step
    hides: Tensor  #: (N,) bool, of a dense mask whose background may hold a class that was not annotated
    unlooked: Tensor  #: (N,) bool, of a case in which some class was not annotated

    def labels(self, label: Tensor, index: Tensor, generator: Generator) -> Tensor:
        """`label` (B, H, W) of the slices `index` (B,), with IGNORE where it may not be used in this step."""
        draw = torch.rand(label.shape, generator=generator, device=generator.device)
        left_out = draw >= self.keep[index][:, None, None]
        left_out |= self.hides[index][:, None, None] & (label == 0)
        return label.masked_fill(left_out, IGNORE)

    def guesses(self, marked: Tensor, index: Tensor) -> Tensor:
        """Labels derived from a habit, (B, H, W): none in cases where another class may lie there."""
        return marked.masked_fill(self.unlooked[index][:, None, None], IGNORE)


def mixed_supervision(store: Store, device: torch.device) -> Mixed | None:
    """The mixed supervision of a store; None if all cases are annotated alike and completely."""
    if not len(store.dense) or not len(store.annotated):
        return None
    unlooked: npt.NDArray[np.bool_] = np.asarray(~store.annotated.all(axis=1))
    both = bool(store.dense.any() and not store.dense.all())
    if not both and not unlooked.any():
        return None
    counts = np.array([(label[0] >= 0).sum() for label in store.labels], float)
    dense = store.dense[store.case_of]
    keep = np.ones(len(counts))
    scribbled = counts[~dense & (counts > 0)]
    if both and len(scribbled):
        keep[dense] = np.minimum(1.0, WORTH * np.median(scribbled) / np.maximum(counts[dense], 1))
    hides = (unlooked & store.dense)[store.case_of]
    return Mixed(
        torch.from_numpy(keep.astype(np.float32)).to(device),
        torch.from_numpy(hides).to(device),
        torch.from_numpy(unlooked[store.case_of]).to(device),
    )


#: Directions of the half planes whose intersection approximates the hull. It contains the hull, is exact for edges in
#: these directions (rows, columns and diagonals among them), and exceeds other edges by at most 0.3 % of their length.
DIRECTIONS = 256
ROUNDING = 1e-3  # pixels; those on the border belong to the hull
SPILL = 0.02  #: largest share of the other strokes outside the hull of a ring
ALONE = 0.03  #: smallest share of a slice in the hull of a ring without other strokes (ACDC: in all but 3 slices)


def outside_hull(label: Tensor) -> Tensor:
    """(B, H, W) bool: pixels outside the convex hull of the drawn ones, label >= 0; none where nothing is drawn.

    A pixel around the hull is not outside.
    """
    drawn = label >= 0
    return ~_hull(drawn, 1.0) & drawn.any(2).any(1)[:, None, None]


def _hull(drawn: Tensor, margin: float) -> Tensor:
    """The convex hull of `drawn` (B, H, W) bool and `margin` pixels around it; empty where nothing is drawn.

    A convex set meets each row in an interval: it is enough to find its ends.
    """
    height, width = drawn.shape[-2:]
    x = torch.arange(width, device=drawn.device, dtype=torch.float32)
    y = torch.arange(height, device=drawn.device, dtype=torch.float32)
    far = math.inf
    # The hull is that of the first and last drawn pixel of each row; rows without any are left out.
    rows = drawn.any(2)
    first = torch.where(drawn, x, far).amin(2)
    last = torch.where(drawn, x, -far).amax(2)
    # Without 0, which looks along the columns: top and bottom below.
    angle = torch.arange(1, DIRECTIONS, device=drawn.device, dtype=torch.float32) * (math.pi / DIRECTIONS)
    right, down = torch.sin(angle), torch.cos(angle)  # right > 0: one direction of each pair looks right, one left
    slope = (down / right)[:, None]
    # <p, d> <= largest over the drawn p, divided by the part of d along the row: x <= reach - y slope.
    reach_right = (last[:, None] + slope * y).amax(2)
    reach_left = (first[:, None] - slope * y).amin(2)
    width_across = (margin + ROUNDING) / right[:, None]  # the margin across each half plane's border
    end = (reach_right[..., None] + width_across - slope * y).amin(1)  # (B, H)
    start = (reach_left[..., None] - width_across + slope * y).amax(1)
    top = torch.where(rows, y, far).amin(1)[:, None]
    bottom = torch.where(rows, y, -far).amax(1)[:, None]
    between = (y >= top - margin) & (y <= bottom + margin)
    within = (x >= start[..., None]) & (x <= end[..., None]) & between[..., None]
    return within & rows.any(1)[:, None, None]


def has_ring(label: Tensor, k: int) -> Tensor:
    """(B,) bool: whether the strokes of k surround the others in each slice (B, H, W).

    The hull of a ring of k holds the strokes of the other classes; alone, it covers a part of the slice.
    """
    ring = label == k
    others = (label >= 0) & ~ring
    hull = _hull(ring, 1.0)
    count, beyond = others.sum((1, 2)), (others & ~hull).sum((1, 2))
    return (beyond <= SPILL * count) & ((count > 0) | (hull.float().mean((1, 2)) >= ALONE))


def mark_outside(label: Tensor, k: int) -> Tensor:
    """Labels (B, M, H, W) and one more map, to be augmented with them: k outside the hull of the first one's strokes.

    Elsewhere the map is IGNORE, and in slices without a ring: someone may have corrected a place there with a few
    short strokes.
    """
    outside = outside_hull(label[:, 0]) & has_ring(label[:, 0], k)[:, None, None]
    marked = torch.where(outside, k, IGNORE).to(label.dtype)
    return torch.cat([label, marked[:, None]], dim=1)


def draw_outside(label: Tensor, marked: Tensor, share: float, generator: Generator) -> Tensor:
    """`label` (B, H, W) with a random `share` of the `marked` pixels as strokes.

    Only a share, since there are fifty times as many of them as stroke pixels.
    """
    chance = torch.rand(label.shape, generator=generator, device=generator.device)
    return torch.where((chance < share) & (label == IGNORE), marked, label)


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
    """Local scaling around a point of each image: shrinks for strength > 0, else enlarges, within the radius."""

    centre: Tensor  #: (B, 2), x and y in normalised coordinates of the image
    strength: Tensor  #: (B,), -1 < s < 3; at the centre lengths become 1 / (1 + s) of what they were
    radius: Tensor  #: (B,), in pixels

    def __call__(self, grid: Tensor) -> Tensor:
        """Output points (B, H, W, 2) to input points: r -> r (1 + s (1 - r / R)^2), which never folds."""
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
