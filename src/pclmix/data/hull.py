"""What strokes say beside what they cover: by their convex hull in a slice.

Outside the hull of all strokes lies background, where the background's stroke goes round the object; inside the hull
of a convex structure's stroke lies that structure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Generator, Tensor

from pclmix.config import Data
from pclmix.errors import PclmixError
from pclmix.labels import IGNORE, Labels

#: Of the half planes whose intersection stands for the hull. It is never smaller than the hull, exact for edges along
#: these (among them rows, columns and diagonals), and for others larger by at most 0.3 % of an edge's length.
DIRECTIONS = 256
ROUNDING = 1e-3  # pixels; those on the border belong to the hull


def hull_shares(data: Data, labels: Labels) -> dict[int, float]:
    """Class -> share to draw of what hulls say about it, 0 being the outside of all; without those that draw none."""
    if any(share > 0 and name not in labels.names for name, share in data.inside.items()):
        known = ", ".join(labels.foreground)
        raise PclmixError(
            f"data.inside names {', '.join(data.inside)}, this dataset has {known}; name convex ones of these, such as "
            f"data.inside={{{labels.foreground[-1]}: 0.25}}, or none: data.inside={{}}"
        )
    inside = {labels.names.index(name): share for name, share in data.inside.items() if name in labels.names}
    if 0 in inside:
        raise PclmixError(f"data.inside.{labels.names[0]}: this is for structures; the background has data.outside")
    shares = {0: data.outside} | inside
    return {k: share for k, share in shares.items() if share > 0}


def outside_hull(label: Tensor) -> Tensor:
    """(B, H, W) bool: pixels outside the convex hull of the drawn ones, label >= 0; none where nothing is drawn.

    A pixel around the hull is not outside.
    """
    drawn = label >= 0
    return ~_hull(drawn, 1.0) & drawn.any(2).any(1)[:, None, None]


def inside_hull(label: Tensor, k: int) -> Tensor:
    """(B, H, W) bool: pixels in the convex hull of what is drawn of class `k`; none where none of it is drawn."""
    return _hull(label == k, 0.0)


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


def mark(label: Tensor, shares: Mapping[int, float]) -> Tensor:
    """Labels (B, M, H, W) and one more map, to be augmented with them: what the hulls of the first one's strokes say.

    The map has 0 outside the hull of all strokes if 0 is among `shares`, k in the hull of class k's for every other k,
    else IGNORE. Where two hulls meet, neither is believed.
    """
    strokes = label[:, 0]
    marked, times = torch.full_like(strokes, IGNORE), torch.zeros_like(strokes)
    for k in shares:
        there = outside_hull(strokes) if k == 0 else inside_hull(strokes, k)
        marked, times = torch.where(there, k, marked), times + there
    return torch.cat([label, torch.where(times == 1, marked, IGNORE).to(label.dtype)[:, None]], dim=1)


def draw(label: Tensor, marked: Tensor, shares: Mapping[int, float], generator: Generator) -> Tensor:
    """`label` (B, H, W) with a random share of the `marked` pixels, `shares[k]` of those of class k, as strokes.

    A share, because all of them would drown the strokes: of the background there are fifty times as many.
    """
    chance = torch.rand(label.shape, generator=generator, device=generator.device)
    share = torch.zeros_like(chance)
    for k, value in shares.items():
        share = torch.where(marked == k, value, share)
    return torch.where((chance < share) & (label == IGNORE), marked, label)
