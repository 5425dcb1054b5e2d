"""Embedding head: the pixel embeddings that the contrast (eq. 8) compares."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pclmix.nets.norm_act import convolve, norm_act

EMBEDDING_WIDTH = 256


class EmbeddingHead(nn.Module):
    """Stride-8 feature (B, C, H/8, W/8) to unit embeddings (B, D, H/8, W/8): 1x1 conv, BN, ReLU, 1x1 conv, L2 norm.

    The hidden layer is as wide as the feature it reads. Embeddings come back in float32, since their cosines are
    divided by a small temperature.
    """

    def __init__(self, channels: int, width: int = EMBEDDING_WIDTH) -> None:
        super().__init__()
        self.project = nn.Sequential(
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, width, 1),
        )

    def forward(self, feature: Tensor) -> Tensor:
        hide, norm, _, embed = self.project
        return F.normalize(embed(norm_act(norm, convolve(hide, feature))).float(), dim=1)
