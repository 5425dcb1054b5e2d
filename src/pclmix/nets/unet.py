"""The U-Net of the scribble literature: 16-32-64-128-256 channels, dropout growing with depth.

Encoder and decoder are two modules, so that a method can put a second decoder on the same features.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pclmix.nets.decoder import Decoder
from pclmix.nets.encoder import Encoder

WIDTHS = (16, 32, 64, 128, 256)
DROPOUT = (0.05, 0.1, 0.2, 0.3, 0.5)


def double_conv(inputs: int, outputs: int, dropout: float) -> nn.Sequential:
    """conv-BN-LeakyReLU, dropout, conv-BN-LeakyReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(inplace=True),
    )


class UNetEncoder(Encoder):
    """Image (B, C, H, W) to features at strides 1, 2, 4, 8, 16 with 16, 32, 64, 128, 256 channels."""

    strides = (1, 2, 4, 8, 16)
    channels = WIDTHS

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        inputs = (in_channels, *WIDTHS[:-1])
        self.blocks = nn.ModuleList(double_conv(a, b, p) for a, b, p in zip(inputs, WIDTHS, DROPOUT, strict=True))

    def forward(self, x: Tensor) -> list[Tensor]:
        features: list[Tensor] = []
        for block in self.blocks:
            x = block(F.max_pool2d(x, 2) if features else x)
            features.append(x)
        return features


class Up(nn.Module):
    """1x1 convolution to the skip's width, bilinear x2, concatenate, double convolution."""

    def __init__(self, inputs: int, skip: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(inputs, skip, 1)
        self.conv = double_conv(2 * skip, skip, 0.0)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = F.interpolate(self.reduce(x), scale_factor=2.0, mode="bilinear", align_corners=True)
        y: Tensor = self.conv(torch.cat([skip, x], dim=1))
        return y


class FamilyDecoder(Decoder):
    """Features at strides 1, 2, 4, 8, 16 to logits (B, K, H, W)."""

    def __init__(self, channels: Sequence[int], classes: int) -> None:
        super().__init__()
        deep_first = list(reversed(channels))
        self.stages = nn.ModuleList(Up(a, b) for a, b in pairwise(deep_first))
        self.head = nn.Conv2d(channels[0], classes, 3, padding=1)

    def pixels(self, features: Sequence[Tensor]) -> Tensor:
        *skips, x = features
        for stage, skip in zip(self.stages, reversed(skips), strict=True):
            x = stage(x, skip)
        return x
