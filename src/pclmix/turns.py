"""Quarter turns drawn per image, with fixed shapes."""

from __future__ import annotations

import torch
from torch import Generator, Tensor


def draw_turns(image: Tensor, generator: Generator) -> Tensor:
    """Quarter turns 0 to 3 for each of (B, C, H, W), uniformly; only half turns where height and width differ."""
    drawn = torch.randint(0, 4, (len(image),), generator=generator, device=image.device)
    return drawn if image.shape[-2] == image.shape[-1] else drawn // 2 * 2


def turn(x: Tensor, turns: Tensor) -> Tensor:
    """Turn each of (B, C, H, W) by its own number of quarter turns; negative ones turn back.

    All that are possible are made and one is chosen: which one is not known to the host.
    """
    turns = (turns % 4).view(-1, 1, 1, 1)
    turned = torch.where(turns == 2, torch.rot90(x, 2, (2, 3)), x)
    if x.shape[-2] == x.shape[-1]:
        turned = torch.where(turns == 1, torch.rot90(x, 1, (2, 3)), turned)
        turned = torch.where(turns == 3, torch.rot90(x, 3, (2, 3)), turned)
    return turned
