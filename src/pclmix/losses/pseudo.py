"""Pseudo labels: random walker and superpixels before training; running means and largest components during it."""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pclmix.kernels.collective import gather_rows
from pclmix.labels import IGNORE
from pclmix.losses import full

BETA = 100.0
#: Intensities are rescaled from this range to [-1, 1], as in scikit-image's example.
RANGE = (-0.35, 1.35)
SEGMENTS, COMPACTNESS = 200, 15.0
#: Enough for noise and spirals at 256x256 (both tested); hearts need four.
ROUNDS = 10
_ONE = 255


def random_walker_labels(
    image: npt.NDArray[np.float32], scribble: npt.NDArray[np.int16], beta: float = BETA
) -> npt.NDArray[np.int16]:
    """The class whose scribble a random walker from each pixel reaches first; (H, W).

    image: (C, H, W) in [0, 1]. scribble: (H, W). Only drawn classes can appear. With one drawn class there is no walk:
    background fills the slice, any other class stays as drawn. Without scribbles every pixel is IGNORE.
    """
    from skimage.segmentation import random_walker

    classes = np.unique(scribble[scribble >= 0])
    if len(classes) < 2:
        return np.zeros_like(scribble) if classes.tolist() == [0] else scribble.copy()
    # The library renumbers labels: pass consecutive numbers and look the classes up afterwards.
    seeds = np.where(scribble >= 0, np.searchsorted(classes, scribble) + 1, 0)
    low, high = RANGE
    scaled = (np.clip(image, low, high) - low) / (high - low) * 2 - 1
    if not (seeds == 0).any() or scaled.std() == 0:
        return _nearest(seeds, classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # probabilities outside [0, 1] by rounding
        # "bf" factors the Laplacian once for all classes: at 256x256 20 times faster here than conjugate gradients.
        found = random_walker(scaled.astype(np.float64), seeds, beta=beta, mode="bf", channel_axis=0)
    walked: npt.NDArray[np.int16] = np.where(found > 0, classes[np.maximum(found, 1) - 1], IGNORE).astype(np.int16)
    return walked


def _nearest(seeds: npt.NDArray[np.int64], classes: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """The class of the nearest scribble, for slices of one grey value."""
    from scipy import ndimage

    place = ndimage.distance_transform_edt(seeds == 0, return_distances=False, return_indices=True)
    found: npt.NDArray[np.int16] = classes[seeds[tuple(place)] - 1].astype(np.int16)
    return found


def superpixels(
    image: npt.NDArray[np.float32], segments: int = SEGMENTS, compactness: float = COMPACTNESS
) -> npt.NDArray[np.int64]:
    """SLIC superpixels of an image (C, H, W) in [0, 1]: consecutive numbers from 0, (H, W).

    The compactness is that of the SLIC paper, for a lightness from 0 to 100; the library works on [0, 1].
    """
    from skimage.segmentation import slic

    numbers = slic(
        image.astype(np.float64),
        n_segments=segments,
        compactness=compactness / 100,
        channel_axis=0,
        convert2lab=False,
        start_label=0,
    )
    return np.unique(numbers, return_inverse=True)[1].reshape(numbers.shape)


def walk_scribbles(numbers: npt.NDArray[np.int64], scribble: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """A superpixel that touches the scribble of exactly one class takes it; the rest keeps what was drawn. (H, W)."""
    classes = int(scribble.max(initial=-1)) + 1
    touched = np.zeros((numbers.max() + 1, max(classes, 1)), dtype=bool)
    drawn = scribble >= 0
    touched[numbers[drawn], scribble[drawn]] = True
    taken = np.where(touched.sum(1) == 1, touched.argmax(1), IGNORE)[numbers]
    return np.where(drawn, scribble, taken).astype(np.int16)


class RunningMean(nn.Module):
    """Running mean of the predictions of every training slice, in the slice's own frame.

    mean: (N, K, H/s, W/s) in 8 bits, 255 for 1: 100 MB for 1,500 slices of four classes at 256x256 and s = 2. Updating
    undoes the augmentation of a prediction, reading applies that of the batch. The mean starts at zero; a pixel's sum
    over classes is the weight of the predictions it has seen, and reading divides by it, so that the first prediction
    counts fully and pixels never seen stay zero.
    """

    mean: Tensor

    def __init__(self, slices: int, classes: int, size: tuple[int, int], stride: int = 2) -> None:
        super().__init__()
        self.stride = stride
        small = (size[0] // stride, size[1] // stride)
        self.register_buffer("mean", torch.zeros(slices, classes, *small, dtype=torch.uint8))

    @torch.no_grad()
    def read(self, index: Tensor, theta: Tensor) -> Tensor:
        """The mean of the slices at index (B,) under the maps theta (B, 2, 3): (B, K, H, W), zeros where unknown."""
        kept = self.mean.index_select(0, index).float() / _ONE
        size = (kept.shape[2] * self.stride, kept.shape[3] * self.stride)
        turned = _sample(kept, theta, size)
        return turned / turned.sum(1, keepdim=True).clamp(min=0.5 / _ONE)

    @torch.no_grad()
    def update(self, index: Tensor, p: Tensor, theta: Tensor, alpha: float) -> None:
        """mean = (1 - alpha) mean + alpha p for the slices at index, of all ranks.

        p: (B, K, H, W) in the frame of the batch. Pixels that the augmentation moved out of the image keep their mean.
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
    """The inverse of the affine maps theta (B, 2, 3); written out, since a solver may make the host wait."""
    (a, b, e), (c, d, f) = theta[:, 0].unbind(1), theta[:, 1].unbind(1)
    determinant = a * d - b * c
    rows = [d, -b, b * f - d * e, -c, a, c * e - a * f]
    return (torch.stack(rows, dim=1) / determinant[:, None]).view(-1, 2, 3)


def identity(count: int, like: Tensor) -> Tensor:
    """Identity maps (count, 2, 3)."""
    return torch.eye(2, 3, device=like.device).expand(count, 2, 3)


def confident_class(p: Tensor, threshold: float) -> Tensor:
    """The likeliest class where its probability exceeds `threshold`, else IGNORE; not differentiated.

    p: (B, K, H, W). Returns (B, H, W) int64.
    """
    best, chosen = p.detach().max(1)
    return chosen.masked_fill(best <= threshold, IGNORE)


@torch.no_grad()
def components(mask: Tensor, rounds: int = ROUNDS) -> Tensor:
    """Number the 8-connected components of mask (M, H, W) bool: (M, H, W) int64, 0 outside.

    Every pixel points at a pixel of its component, at first itself. In a round each pixel takes the largest pointer of
    its neighbours, passes it to the pixel it points at, and follows pointers twice (pointer jumping). Chains shorten
    exponentially, so that few rounds reach across long shapes; with too few a component would count as several.
    """
    _, height, width = mask.shape
    # Index 0 means "outside" and points at itself; float32 is exact up to 2^24 pixels.
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
