"""Outside the convex hull of a slice's strokes: background, where the background's stroke goes round the object."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from pclmix.labels import IGNORE

DIRECTIONS = 64  # of the half planes whose intersection stands for the hull; it is never smaller than the hull


def outside_hull(label: Tensor) -> Tensor:
    """(B, H, W) bool: pixels outside the convex hull of the drawn ones, label >= 0; none where nothing is drawn.

    A pixel around the hull is not outside. A convex set meets each row in an interval: it is enough to find its ends.
    """
    height, width = label.shape[-2:]
    drawn = label >= 0
    x = torch.arange(width, device=label.device, dtype=torch.float32)
    y = torch.arange(height, device=label.device, dtype=torch.float32)
    far = math.inf
    # The hull is that of the first and last drawn pixel of each row; a row without any reaches nowhere.
    rows = drawn.any(2)
    first = torch.where(drawn, x, far).amin(2)
    last = torch.where(drawn, x, -far).amax(2)
    angle = (torch.arange(DIRECTIONS, device=label.device, dtype=torch.float32) + 0.5) * (math.pi / DIRECTIONS)
    right, down = torch.sin(angle), torch.cos(angle)  # right > 0: one direction of each pair looks right, one left
    slope = (down / right)[:, None]
    # <p, d> <= largest over the drawn p, divided by the part of d along the row: x <= reach - y slope.
    reach_right = (last[:, None] + slope * y).amax(2)
    reach_left = (first[:, None] - slope * y).amin(2)
    margin = 1 / right[:, None]  # a pixel, across each half plane's border
    end = (reach_right[..., None] + margin - slope * y).amin(1)  # (B, H)
    start = (reach_left[..., None] - margin + slope * y).amax(1)
    top = torch.where(rows, y, far).amin(1)[:, None]
    bottom = torch.where(rows, y, -far).amax(1)[:, None]
    beyond = (x < start[..., None]) | (x > end[..., None]) | ((y < top - 1) | (y > bottom + 1))[..., None]
    return beyond & rows.any(1)[:, None, None]


def mark_outside(label: Tensor) -> Tensor:
    """Labels (B, M, H, W) and one more map, to be augmented with them: 0 outside the hull of the first, else IGNORE."""
    outside = outside_hull(label[:, 0])
    return torch.cat([label, torch.where(outside, 0, IGNORE).to(label.dtype)[:, None]], dim=1)


def draw_outside(label: Tensor, marked: Tensor, share: float, generator: Generator) -> Tensor:
    """`label` (B, H, W) with a random `share` of the `marked` pixels as background, 0.

    A share, because all of them would drown the strokes: there are fifty times as many.
    """
    chosen = torch.rand(label.shape, generator=generator, device=generator.device) < share
    return torch.where(chosen & (marked == 0) & (label == IGNORE), 0, label)
