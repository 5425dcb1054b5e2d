"""The habit `ring` in training: outside the convex hull of all strokes of a slice lies one class, the background.

It runs on the batch, on its device, in fixed shapes.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from pclmix.labels import IGNORE

#: Of the half planes whose intersection stands for the hull. It is never smaller than the hull, exact for edges along
#: these (among them rows, columns and diagonals), and for others larger by at most 0.3 % of an edge's length.
DIRECTIONS = 256
ROUNDING = 1e-3  # pixels; those on the border belong to the hull


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
    # The hull is that of the first and last drawn pixel of each row; a row without any reaches nowhere.
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


def mark_outside(label: Tensor, k: int) -> Tensor:
    """Labels (B, M, H, W) and one more map, to be augmented with them: k outside the hull of the first one's strokes.

    Elsewhere the map is IGNORE.
    """
    marked = torch.where(outside_hull(label[:, 0]), k, IGNORE).to(label.dtype)
    return torch.cat([label, marked[:, None]], dim=1)


def draw_outside(label: Tensor, marked: Tensor, share: float, generator: Generator) -> Tensor:
    """`label` (B, H, W) with a random `share` of the `marked` pixels as strokes.

    A share, because all of them would drown the strokes: there are fifty times as many.
    """
    chance = torch.rand(label.shape, generator=generator, device=generator.device)
    return torch.where((chance < share) & (label == IGNORE), marked, label)
