"""F of the paper: one encoder, a CNN and a transformer decoder, the embedding head. Training alone uses all of it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from pclmix.errors import PclmixError
from pclmix.nets.embedding import EMBEDDING_WIDTH, EmbeddingHead
from pclmix.nets.fork import fork
from pclmix.nets.segmenter import Segmenter, build_segmenter
from pclmix.nets.swin_decoder import WIDTH, SwinDecoder

CONTRAST_STRIDE = 8


class DualOutput(NamedTuple):
    """Eq. 2 before the softmax: both decoders' logits, and the unit embeddings of the first images."""

    logits_c: Tensor  # (B, K, H, W)
    logits_t: Tensor  # (B, K, H, W)
    embeddings: Tensor  # (embed, D, H/8, W/8)


class DualDecoder(nn.Module):
    """`net` predicts (encoder + CNN decoder), `aux` is the transformer decoder, `head` embeds pixels at stride 8.

    The state dict's keys under `net.` are exactly those of the Segmenter that predicts later.
    """

    def __init__(self, net: Segmenter, aux: SwinDecoder, head: EmbeddingHead) -> None:
        super().__init__()
        self.net = net
        self.aux = aux
        self.head = head

    def forward(self, x: Tensor, embed: int) -> DualOutput:
        return forward_dual(self.net, self.aux, self.head, x, embed)


def forward_dual(net: Segmenter, aux: SwinDecoder, head: EmbeddingHead, x: Tensor, embed: int) -> DualOutput:
    """Both logits of all images, embeddings of the first `embed` (the contrast sees unmixed images only)."""
    readers = [fork(feature, len(x), len(x), embed) for feature in net.features(x)]
    for_c, for_t, for_head = zip(*readers, strict=True)
    stride8 = for_head[net.encoder.strides.index(CONTRAST_STRIDE)]
    return DualOutput(net.decode(for_c), aux(for_t), head(stride8))


def build_auxiliary(
    net: Segmenter,
    classes: int,
    drop_path: float = 0.0,
    absolute_position: bool = False,
    embedding_width: int = EMBEDDING_WIDTH,
    swin_width: int = WIDTH,
) -> tuple[SwinDecoder, EmbeddingHead]:
    """What training adds to `net`: the transformer decoder and the embedding head for its encoder's features."""
    strides, channels = net.encoder.strides, net.encoder.channels
    if strides[-4:] != SwinDecoder.strides:
        raise PclmixError("this network has no features at strides 4 to 32, which PCLMix needs: set net= to a resnet")
    aux = SwinDecoder(channels, classes, drop_path, absolute_position, swin_width)
    return aux, EmbeddingHead(channels[strides.index(CONTRAST_STRIDE)], embedding_width)


def build_dual(
    net: str,
    in_channels: int,
    classes: int,
    stride_in_1x1: bool = False,
    drop_path: float = 0.0,
    absolute_position: bool = False,
    embedding_width: int = EMBEDDING_WIDTH,
) -> DualDecoder:
    """PCLMix's network by the name of its encoder (resnet18, resnet34, resnet50)."""
    segmenter = build_segmenter(net, in_channels, classes, stride_in_1x1)
    return DualDecoder(segmenter, *build_auxiliary(segmenter, classes, drop_path, absolute_position, embedding_width))
