"""What a CNN decoder is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class Decoder(nn.Module):
    """Features, finest first, to logits (B, K, H, W), by way of one more feature that a method may look at."""

    head: nn.Conv2d

    def pixels(self, features: Sequence[Tensor]) -> Tensor:
        """The last feature, (B, D, H, W), which the head turns into logits."""
        raise NotImplementedError

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        logits: Tensor = self.head(self.pixels(features))
        return logits
