"""CNN decoders and the U-Net of the scribble literature.

UNetEncoder and FamilyDecoder are that U-Net: 16 to 256 channels, dropout growing with depth. UNetDecoder is Fc of the
paper, a U-Net decoder on the features of a ResNet. Encoders and decoders are separate modules, so that a method can put
a second decoder on the same features.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pclmix.kernels.ops import norm_act, upsample_concat
from pclmix.nets.resnet import Encoder

WIDTHS = (16, 32, 64, 128, 256)
DROPOUT = (0.05, 0.1, 0.2, 0.3, 0.5)
RESNET_WIDTHS = (256, 128, 64, 32, 16)


class Decoder(nn.Module):
    """Features, finest first, to logits (B, K, H, W). Methods may use the feature before the head, `pixels`."""

    head: nn.Conv2d

    def pixels(self, features: Sequence[Tensor]) -> Tensor:
        """The last feature, (B, D, H, W), which the head turns into logits."""
        raise NotImplementedError

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        logits: Tensor = self.head(self.pixels(features))
        return logits


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


class ConvNormReLU(nn.Sequential):
    """A convolution, its normalisation and a ReLU, under the names 0, 1 and 2."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__(conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU(inplace=True))

    def forward(self, input: Tensor) -> Tensor:
        return norm_act(self[1], self[0](input))


def conv_bn_relu(inputs: int, outputs: int) -> nn.Sequential:
    return ConvNormReLU(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False))


class Stage(nn.Module):
    """Upsample x2, concatenate the skip where there is one, two conv-BN-ReLU.

    Upsampling repeats pixels: the convolutions that follow smooth it, and its backward is a sum of four neighbours,
    whereas the backward of bilinear upsampling on a GPU adds with atomics, slowly and in no fixed order.
    """

    def __init__(self, inputs: int, skip: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = conv_bn_relu(inputs + skip, outputs)
        self.conv2 = conv_bn_relu(outputs, outputs)

    def forward(self, x: Tensor, skip: Tensor | None) -> Tensor:
        y: Tensor = self.conv2(self.conv1(upsample_concat(x, skip)))
        return y


class UNetDecoder(Decoder):
    """Features at strides 2, 4, 8, 16, 32 to logits (B, K, H, W); widths 256, 128, 64, 32, 16, then a 3x3 head.

    `channels` are the encoder's, finest first; no stage is wider than half of the deepest. The last stage reaches
    stride 1, where the encoder has no skip to give.
    """

    def __init__(self, channels: Sequence[int], classes: int) -> None:
        super().__init__()
        *skips, deepest = channels
        widths = [min(width, deepest // 2) for width in RESNET_WIDTHS]
        inputs = [deepest, *widths[:-1]]
        self.stages = nn.ModuleList(
            Stage(a, b, c) for a, b, c in zip(inputs, [*reversed(skips), 0], widths, strict=True)
        )
        self.head = nn.Conv2d(widths[-1], classes, 3, padding=1)
        for module in self.stages.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_uniform_(module.weight, mode="fan_in", nonlinearity="relu")

    def pixels(self, features: Sequence[Tensor]) -> Tensor:
        *skips, x = features
        for stage, skip in zip(self.stages, [*reversed(skips), None], strict=True):
            x = stage(x, skip)
        return x
