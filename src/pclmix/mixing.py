"""Mixing of two batches: drawn once, applied to images, labels and predictions.

`mix = mixer.draw(x1, x2, generator)` draws the mask or weight; `mix.images(x1, x2)` is x12 and `mix.images(x2, x1)` is
x21. Labels and predictions likewise. With a mask M, x12 = M x1 + (1-M) x2.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from pclmix.errors import PclmixError, nearest
from pclmix.labels import IGNORE
from pclmix.losses.supervised import SoftLabel
from pclmix.registry import Registry


class Mix(ABC):
    """One draw. M selects pixels of the first argument; the rest comes from the second."""

    @abstractmethod
    def images(self, a: Tensor, b: Tensor) -> Tensor:
        """(B, C, H, W) twice to one."""

    @abstractmethod
    def labels(self, a: Tensor, b: Tensor) -> Tensor | SoftLabel:
        """(B, H, W) twice to one; a SoftLabel where labels are blended and not selected."""

    @abstractmethod
    def predictions(self, a: Tensor, b: Tensor) -> Tensor:
        """(B, K, H, W) twice to one. Erased pixels have no prediction: zeros."""


@dataclass(frozen=True)
class Select(Mix):
    """Every pixel is that of `a` where `mask` (B, 1, H, W) is set and that of `b` elsewhere."""

    mask: Tensor

    def images(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(self.mask, a, b)

    def labels(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(self.mask.squeeze(1), a, b)

    def predictions(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(self.mask, a, b)


@dataclass(frozen=True)
class Erase(Mix):
    """`a`, emptied where `mask` (B, 1, H, W) is set; `b` is not used."""

    mask: Tensor

    def images(self, a: Tensor, b: Tensor) -> Tensor:
        return a.masked_fill(self.mask, 0)

    def labels(self, a: Tensor, b: Tensor) -> Tensor:
        return a.masked_fill(self.mask.squeeze(1), IGNORE)

    def predictions(self, a: Tensor, b: Tensor) -> Tensor:
        return a.masked_fill(self.mask, 0)


@dataclass(frozen=True)
class Blend(Mix):
    """weight a + (1 - weight) b everywhere; weight: (B, 1, 1, 1)."""

    weight: Tensor

    def images(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.lerp(b, a, self.weight.to(a.dtype))

    def labels(self, a: Tensor, b: Tensor) -> SoftLabel:
        return SoftLabel(a, b, self.weight.squeeze(1))

    def predictions(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.lerp(b, a, self.weight.to(a.dtype))


#: Saliency of each pixel of x1 and of x2 for saliency-guided mixers: (B, H, W) each, >= 0.
Saliency = tuple[Tensor, Tensor]


class Mixer(ABC):
    """Draws mixes. Its parameters are the fields of the dataclass, validated at construction."""

    @abstractmethod
    def draw(self, a: Tensor, b: Tensor, generator: torch.Generator, saliency: Saliency | None = None) -> Mix:
        """One Mix for the batches a, b: (B, C, H, W). The generator lives on their device."""


MIXERS: Registry[type[Mixer]] = Registry("mixing function")


def make_mixer(name: str, parameters: Mapping[str, float | int] | None = None) -> Mixer:
    """The mixer of that name; errors name what is allowed."""
    kind = MIXERS.find(name)
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in parameters or {}:
        if key not in known:
            raise PclmixError(f"{name} has no parameter '{key}'.{nearest(key, known)} Known: {', '.join(known)}")
    return kind(**(parameters or {}))


@MIXERS.register("cutmix")
@dataclass(frozen=True)
class CutMix(Mixer):
    """A rectangle of x1 in x2. area: its share of the image."""

    area: float = 0.2

    def __post_init__(self) -> None:
        _check_share("cutmix", "area", self.area)

    def draw(self, a: Tensor, b: Tensor, generator: torch.Generator, saliency: Saliency | None = None) -> Select:
        return Select(rectangles(a, self.area, generator))


@MIXERS.register("cutout")
@dataclass(frozen=True)
class Cutout(Mixer):
    """A rectangle erased. area: its share of the image."""

    area: float = 0.2

    def __post_init__(self) -> None:
        _check_share("cutout", "area", self.area)

    def draw(self, a: Tensor, b: Tensor, generator: torch.Generator, saliency: Saliency | None = None) -> Erase:
        return Erase(rectangles(a, self.area, generator))


@MIXERS.register("mixup")
@dataclass(frozen=True)
class MixUp(Mixer):
    """The whole of both images, blended by a weight from Beta(alpha, alpha) per sample."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise PclmixError(f"mixup: alpha is {self.alpha}; it must be a number above 0")

    def draw(self, a: Tensor, b: Tensor, generator: torch.Generator, saliency: Saliency | None = None) -> Blend:
        # Beta(s, s) is one Gamma(s) over the sum of two; a tiny alpha can underflow both to 0.
        shape = torch.full((2, len(a), 1, 1, 1), self.alpha, device=a.device)
        one, other = torch._standard_gamma(shape, generator=generator).clamp(min=torch.finfo(shape.dtype).tiny)
        return Blend(one / (one + other))


@MIXERS.register("saliency")
@dataclass(frozen=True)
class SaliencyMix(Mixer):
    """After Puzzle Mix: the blocks of x1 that are most salient compared with the blocks of x2 that they hide.

    area: the share of the image, in whole blocks. block: their side in pixels. smooth: how many times the gain is
    averaged over neighbouring blocks first, so that the chosen ones are connected.
    """

    area: float = 0.2
    block: int = 16
    smooth: int = 2

    def __post_init__(self) -> None:
        _check_share("saliency", "area", self.area)
        if self.block < 1 or self.smooth < 0:
            raise PclmixError(
                f"saliency: block {self.block} must be at least 1 and smooth {self.smooth} at least 0, whole numbers"
            )

    def draw(self, a: Tensor, b: Tensor, generator: torch.Generator, saliency: Saliency | None = None) -> Select:
        """Without `saliency` it is the local contrast of the images."""
        of_a, of_b = (local_contrast(a), local_contrast(b)) if saliency is None else saliency
        gain = self._blocks(of_a) - self._blocks(of_b)
        for _ in range(self.smooth):
            gain = F.avg_pool2d(gain, 3, stride=1, padding=1, count_include_pad=False)
        # The largest total gain at a given area is the sum of the largest gains; ties are broken at random.
        flat = gain.flatten(1)
        lot = torch.rand(flat.shape, generator=generator, device=flat.device).argsort(1)
        best = lot.gather(1, flat.gather(1, lot).argsort(dim=1, descending=True, stable=True))
        chosen = best[:, : max(1, round(self.area * flat.shape[1]))]
        mask = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, chosen, True).view_as(gain)
        mask = mask.repeat_interleave(self.block, 2).repeat_interleave(self.block, 3)
        return Select(mask[:, :, : a.shape[2], : a.shape[3]])

    def _blocks(self, saliency: Tensor) -> Tensor:
        """Saliency per block, (B, H, W) -> (B, 1, h, w), with sum 1 for each image, whatever its contrast."""
        pooled = F.avg_pool2d(saliency.detach().float().unsqueeze(1), self.block, ceil_mode=True)
        return pooled / pooled.sum((2, 3), keepdim=True).clamp(min=torch.finfo(pooled.dtype).tiny)


def rectangles(image: Tensor, area: float, generator: torch.Generator) -> Tensor:
    """One rectangle per sample, inside the image, of `area` of its pixels up to rounding: (B, 1, H, W) bool.

    The height is log-uniform between a strip across the whole image and a strip down it, so that every aspect ratio
    that fits is possible; the position is uniform among those that fit.
    """
    (batch, _, height, width), device = image.shape, image.device
    shape, top, left = torch.rand(3, batch, 1, 1, 1, generator=generator, device=device)
    pixels = area * height * width
    # The width must fit as well: at most the image's, at least one pixel.
    low, high = max(area * height, 1.0), max(min(height, pixels), 1.0)
    h = (low * (high / low) ** shape).round().clamp(1, height)
    w = (pixels / h).round().clamp(1, width)
    # The product can round up to the bound itself.
    top = torch.minimum((top * (height - h + 1)).floor(), height - h)
    left = torch.minimum((left * (width - w + 1)).floor(), width - w)
    y = torch.arange(height, device=device).view(1, 1, -1, 1)
    x = torch.arange(width, device=device).view(1, 1, 1, -1)
    inside: Tensor = (y >= top) & (y < top + h) & (x >= left) & (x < left + w)
    return inside


def squares(image: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """One square of `side` pixels per sample, or less where the image is smaller, inside it: (B, 1, H, W) bool."""
    (batch, _, height, width), device = image.shape, image.device
    h, w = min(side, height), min(side, width)
    top = torch.randint(0, height - h + 1, (batch, 1, 1, 1), generator=generator, device=device)
    left = torch.randint(0, width - w + 1, (batch, 1, 1, 1), generator=generator, device=device)
    y = torch.arange(height, device=device).view(1, 1, -1, 1)
    x = torch.arange(width, device=device).view(1, 1, 1, -1)
    inside: Tensor = (y >= top) & (y < top + h) & (x >= left) & (x < left + w)
    return inside


def local_contrast(image: Tensor) -> Tensor:
    """The magnitude of the finite-difference gradient, summed over channels: (B, C, H, W) -> (B, H, W)."""
    image = image.detach().float()
    down = F.pad(image[:, :, 1:] - image[:, :, :-1], (0, 0, 0, 1))
    right = F.pad(image[:, :, :, 1:] - image[:, :, :, :-1], (0, 1))
    return torch.hypot(down, right).sum(1)


def _check_share(name: str, key: str, value: float) -> None:
    if not 0 < value < 1:
        raise PclmixError(f"{name}: {key} is {value}; it must lie between 0 and 1, as a share of the image")
