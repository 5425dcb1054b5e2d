"""CNN decoder Fc: a U-Net decoder on the features of a ResNet encoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pclmix.nets import fused
from pclmix.nets.decoder import Decoder
from pclmix.nets.norm_act import ConvNormReLU

WIDTHS = (256, 128, 64, 32, 16)


def conv_bn_relu(inputs: int, outputs: int) -> nn.Sequential:
    return ConvNormReLU(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False))


def upsample_concat(x: Tensor, skip: Tensor | None) -> Tensor:
    """x (B, C, H, W) with every pixel repeated 2 x 2, and the skip (B, S, 2H, 2W) where there is one, as channels."""
    if fused.usable("upsample", x, skip) and fused.channels_last(x, skip):
        from pclmix.nets.fused import upsample

        if upsample.fits(x, skip):
            return upsample.upsample_concat(x, skip)
    # Repeating pixels loses nothing in any type; autocast would do it in float32.
    with torch.autocast(x.device.type, enabled=False):
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
    return x if skip is None else torch.cat([x, skip], dim=1)


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
        widths = [min(width, deepest // 2) for width in WIDTHS]
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
