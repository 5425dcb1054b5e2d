"""The label of a blend of two scribbled images, kept as the two scribbles and their weight until a loss asks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SoftLabel:
    """`weight` parts of scribble `a` and the rest of scribble `b`.

    a, b: (B, H, W) with IGNORE where nothing was drawn. weight: (B, 1, 1) in [0, 1].
    """

    a: Tensor
    b: Tensor
    weight: Tensor

    def mask(self) -> Tensor:
        """(B, H, W) bool: scribbled in at least one of the two."""
        return (self.a >= 0) | (self.b >= 0)

    def dense(self, classes: int) -> Tensor:
        """(B, K, H, W): `weight` on the class of `a` and 1 - `weight` on that of `b`, each only where it is drawn.

        A pixel drawn in one of the two holds that one's weight alone, for nothing is known of the other; a pixel
        drawn in neither holds zeros.
        """
        k = torch.arange(classes, device=self.a.device).view(1, -1, 1, 1)
        # IGNORE equals no class, so pixels that were not drawn get nothing.
        weight = self.weight.unsqueeze(1)
        return weight * (self.a.unsqueeze(1) == k) + (1 - weight) * (self.b.unsqueeze(1) == k)
