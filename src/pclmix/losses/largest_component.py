"""Connected components of a batch of masks on the device, by a fixed number of rounds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Enough for masks of noise and for spirals at 256x256 (the test has both); hearts need four.
ROUNDS = 10


@torch.no_grad()
def components(mask: Tensor, rounds: int = ROUNDS) -> Tensor:
    """Numbers of the 8-connected components of mask (M, H, W) bool: (M, H, W) int64, 0 outside, equal within one.

    Every pixel points at a pixel of its component, at first itself. In a round each looks at the best of its
    neighbours' pointers, hands that on to the one it points at, and then follows pointers twice. Pointers only grow,
    and lengths of chains shrink by powers, so that few rounds reach across long shapes. Were they too few, a
    component would count as several.
    """
    _, height, width = mask.shape
    # Place 0 stands for "outside" and points at itself; float32 counts exactly to 2^24 pixels.
    own = torch.arange(1, height * width + 1, device=mask.device).view(1, height, width) * mask
    inside = mask.flatten(1)
    parent = F.pad(own.flatten(1), (1, 0))
    for _ in range(rounds):
        pointer = parent[:, 1:]
        best = F.max_pool2d(pointer.view(mask.shape).float()[:, None], 3, 1, 1).long().flatten(1) * inside
        parent = parent.scatter_reduce(1, pointer, best, "amax")
        parent = torch.cat([parent[:, :1] * 0, torch.maximum(parent[:, 1:], best)], dim=1)
        for _ in range(2):
            parent = parent.gather(1, parent)
    return parent[:, 1:].view(mask.shape)


@torch.no_grad()
def largest_components(label: Tensor, classes: int, rounds: int = ROUNDS) -> Tensor:
    """Keep the largest component of each class of label (B, H, W) in each image; its other pixels become 0.

    Pixels that touch by a corner are connected. Of two components of one size either may be kept.
    """
    k = torch.arange(1, classes, device=label.device).view(1, -1, 1, 1)
    mask = (label[:, None] == k).flatten(0, 1)
    number = components(mask, rounds).flatten(1)
    size = torch.zeros(len(number), number.shape[1] + 1, dtype=torch.int32, device=label.device)
    size.scatter_add_(1, number, mask.flatten(1).int())
    kept = (number == size.argmax(1, keepdim=True)) & mask.flatten(1)
    return label * kept.view(label.shape[0], classes - 1, *label.shape[1:]).any(1)


def without_islands(p: Tensor, rounds: int = ROUNDS) -> Tensor:
    """The prediction p (B, K, H, W) with every pixel off its class's largest component made background for certain.

    Not differentiated: a target.
    """
    p = p.detach()
    label = p.argmax(1)
    island = (label > 0) & (largest_components(label, p.shape[1], rounds) == 0)
    background = torch.arange(p.shape[1], device=p.device).view(1, -1, 1, 1) == 0
    return torch.where(island[:, None], background.to(p.dtype), p)
