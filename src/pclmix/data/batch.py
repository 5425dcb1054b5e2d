"""What a method sees of the data in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Images (B, C, H, W) in [0, 1], labels (B, H, W) with IGNORE, and where the slices come from."""

    image: Tensor
    label: Tensor
    index: Tensor  #: (B,) position of each slice in the training store
    maps: Mapping[str, Tensor] = field(default_factory=dict)  #: the method's own label maps, each (B, H, W)
    theta: Tensor | None = None  #: (B, 2, 3) the affine map of each image's augmentation, output to input; None: none
