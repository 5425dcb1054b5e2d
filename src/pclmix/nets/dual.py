"""F of the paper: one encoder, a CNN and a transformer decoder, an embedding head; only training uses it whole."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from pclmix.errors import PclmixError
from pclmix.kernels.ops import fork, norm_act
from pclmix.nets.segmenter import Segmenter
from pclmix.nets.swin import WIDTH, SwinDecoder

CONTRAST_STRIDE = 8
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
        return F.normalize(embed(norm_act(norm, hide(feature))).float(), dim=1)


class DualOutput(NamedTuple):
    """Equation 2 before the softmax: logits of both decoders, and unit embeddings of the first images."""

    logits_c: Tensor  # (B, K, H, W)
    logits_t: Tensor  # (B, K, H, W)
    embeddings: Tensor  # (embed, D, H/8, W/8)


def forward_dual(net: Segmenter, aux: SwinDecoder, head: EmbeddingHead, x: Tensor, embed: int) -> DualOutput:
    """Equation 2, (p_c, p_t) = F(x), before the softmax; embeddings of the first `embed` images, the unmixed ones."""
    readers = [fork(feature, len(x), len(x), embed) for feature in net.features(x)]
    for_c, for_t, for_head = zip(*readers, strict=True)
    stride8 = for_head[net.encoder.strides.index(CONTRAST_STRIDE)]
    return DualOutput(net.decode(for_c), aux(for_t), head(stride8))


def build_auxiliary(
    net: Segmenter,
    classes: int,
    embedding_width: int = EMBEDDING_WIDTH,
    swin_width: int = WIDTH,
) -> tuple[SwinDecoder, EmbeddingHead]:
    """The modules that training adds to `net`: transformer decoder and embedding head on its encoder's features."""
    strides, channels = net.encoder.strides, net.encoder.channels
    if strides[-4:] != SwinDecoder.strides:
        raise PclmixError("this network has no features at strides 4 to 32, which PCLMix needs: set net= to a resnet")
    aux = SwinDecoder(channels, classes, swin_width)
    return aux, EmbeddingHead(channels[strides.index(CONTRAST_STRIDE)], embedding_width)
