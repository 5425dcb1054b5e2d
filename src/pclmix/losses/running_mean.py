"""A running mean of the prediction of every training slice, in the slice's own frame."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pclmix.distributed import gather_rows
from pclmix.labels import IGNORE
from pclmix.losses.precision import full

_ONE = 255


class RunningMean(nn.Module):
    """mean: (N, K, H/s, W/s) in 8 bits, 255 for 1: 100 MB for 1,500 slices of four classes at 256x256 and s = 2.

    An augmented prediction is turned back into the slice's own frame before it is added, and what is read is turned
    as the batch is. It starts at nothing: a pixel's sum over classes is the weight of what it has seen, and reading
    divides by it, so that the first prediction counts fully and a pixel never seen has none.
    """

    mean: Tensor

    def __init__(self, slices: int, classes: int, size: tuple[int, int], stride: int = 2) -> None:
        super().__init__()
        self.stride = stride
        small = (size[0] // stride, size[1] // stride)
        self.register_buffer("mean", torch.zeros(slices, classes, *small, dtype=torch.uint8))

    @torch.no_grad()
    def read(self, index: Tensor, theta: Tensor) -> Tensor:
        """The mean of the slices at index (B,) as theta (B, 2, 3) turns them: (B, K, H, W), zeros where unknown."""
        kept = self.mean.index_select(0, index).float() / _ONE
        size = (kept.shape[2] * self.stride, kept.shape[3] * self.stride)
        turned = _sample(kept, theta, size)
        return turned / turned.sum(1, keepdim=True).clamp(min=0.5 / _ONE)

    @torch.no_grad()
    def update(self, index: Tensor, p: Tensor, theta: Tensor, alpha: float) -> None:
        """mean = (1 - alpha) mean + alpha p for the slices at index, of all ranks.

        p: (B, K, H, W) in the batch's frame. What the augmentation moved out of the image keeps its mean.
        """
        small = F.avg_pool2d(full(p.detach()), self.stride)
        own = _sample(small, invert(theta), (small.shape[2], small.shape[3]))
        own, index = gather_rows(own), gather_rows(index)
        seen = own.sum(1, keepdim=True)
        old = self.mean.index_select(0, index).float() / _ONE
        new = old * (1 - alpha * seen) + alpha * own
        self.mean.index_copy_(0, index, (new * _ONE).round().clamp(0, _ONE).to(torch.uint8))


def _sample(x: Tensor, theta: Tensor, size: tuple[int, int]) -> Tensor:
    grid = F.affine_grid(theta, [x.shape[0], 1, *size], align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def invert(theta: Tensor) -> Tensor:
    """The affine maps (B, 2, 3) that undo `theta`; by hand, since a solver may make the host wait."""
    (a, b, e), (c, d, f) = theta[:, 0].unbind(1), theta[:, 1].unbind(1)
    determinant = a * d - b * c
    rows = [d, -b, b * f - d * e, -c, a, c * e - a * f]
    return (torch.stack(rows, dim=1) / determinant[:, None]).view(-1, 2, 3)


def identity(count: int, like: Tensor) -> Tensor:
    """Affine maps (count, 2, 3) that change nothing."""
    return torch.eye(2, 3, device=like.device).expand(count, 2, 3)


def confident_label(mean: Tensor, label: Tensor, threshold: float) -> Tensor:
    """The likeliest class where nothing was drawn and its running mean exceeds `threshold`, else IGNORE.

    mean: (B, K, H, W). label: (B, H, W). Returns (B, H, W) int64.
    """
    best, chosen = mean.max(1)
    return chosen.masked_fill((label >= 0) | (best <= threshold), IGNORE)
