"""The CNN: a ResNet encoder, decoders, and the U-Net of the scribble literature.

ResNetEncoder is Fe of the paper, cut before its pooling, with a feature at each of five strides. Module names are
torchvision's (`conv1`, `layer1.0.conv2`, `layer2.0.downsample.0`, ...), so public weights fit by name.

UNetEncoder and FamilyDecoder are that U-Net: 16 to 256 channels, dropout growing with depth. UNetDecoder is Fc of the
paper, a U-Net decoder on the features of a ResNet. Encoders and decoders are separate modules, so that a method can put
a second decoder on the same features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pclmix.kernels.ops import norm_act, norm_act_for, upsample_concat
from pclmix.registry import Registry


@dataclass(frozen=True)
class Depth:
    """The kernels of a ResNet's blocks, how many blocks each layer has, how wide they are, which kernel is strided."""

    kernels: tuple[int, ...]
    layers: tuple[int, int, int, int]
    expansion: int
    widths: tuple[int, int, int, int] = (64, 128, 256, 512)
    strided: int = 0  # of the kernels, in the first block of layers 2 to 4


BASIC, BOTTLENECK = (3, 3), (1, 3, 1)
DEPTHS: Registry[Depth] = Registry("encoder")
DEPTHS.register("resnet10")(Depth(BASIC, (1, 1, 1, 1), 1, (16, 32, 64, 128)))  # a thin network for CPUs
DEPTHS.register("resnet18")(Depth(BASIC, (2, 2, 2, 2), 1))
DEPTHS.register("resnet34")(Depth(BASIC, (3, 4, 6, 3), 1))
DEPTHS.register("resnet50")(Depth(BOTTLENECK, (3, 4, 6, 3), 4, strided=1))
DEPTHS.register("resnet50v1")(Depth(BOTTLENECK, (3, 4, 6, 3), 4, strided=0))


class Encoder(nn.Module):
    """The interface that decoders rely on: features, finest first, with these channels at these strides."""

    channels: tuple[int, ...]
    strides: tuple[int, ...]


class ResNetEncoder(Encoder):
    """A ResNet by name: image (B, C, H, W) to features at strides 2, 4, 8, 16, 32.

    Channels are 64, 256, 512, 1024, 2048 for resnet50, 64, 64, 128, 256, 512 for resnet18 and resnet34.
    ResNet-50 has two versions: torchvision's (`resnet50`) has the stride of layers 2 to 4 on the 3x3 convolution, the
    original (`resnet50v1`) on the first 1x1 convolution. The names and shapes of the weights are the same, the features
    are not: `weights.fitting_net` tells which version a file was trained in.
    """

    strides = (2, 4, 8, 16, 32)

    def __init__(self, name: str, in_channels: int) -> None:
        super().__init__()
        depth = DEPTHS.find(name)
        self.name = name
        self.channels = (depth.widths[0], *(width * depth.expansion for width in depth.widths))
        self.conv1 = nn.Conv2d(in_channels, depth.widths[0], 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(depth.widths[0])
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Sequential(
                *(
                    Block(
                        self.channels[layer] if number == 0 else self.channels[layer + 1],
                        (*[depth.widths[layer]] * (len(depth.kernels) - 1), self.channels[layer + 1]),
                        depth.kernels,
                        {depth.strided: 2} if layer > 0 and number == 0 else {},
                    )
                    for number in range(depth.layers[layer])
                )
            )
            for layer in range(4)
        )
        for module in self.modules():
            # On the meta device initialisation is not needed, and torch would import its compiler for it.
            if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> list[Tensor]:
        x, feature = norm_act_for(2, self.bn1, self.conv1(x))
        features = [feature]
        x = shortcut = self.maxpool(x)
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in layer:
                assert isinstance(block, Block)
                x, shortcut, feature = residual_block(block, x, shortcut)
            features.append(feature)
        return features


class Block(nn.Module):
    """Convolutions with BatchNorm and ReLU, the last ReLU after the addition of the shortcut.

    `widths` and `kernels` are those of the convolutions, `strides` the stride of those that have one by number. The
    shortcut is a 1x1 convolution where its width or size changes.
    """

    def __init__(self, width: int, widths: tuple[int, ...], kernels: tuple[int, ...], strides: dict[int, int]) -> None:
        super().__init__()
        stride = max(strides.values(), default=1)
        downsample = None
        if stride > 1 or width != widths[-1]:
            downsample = nn.Sequential(
                nn.Conv2d(width, widths[-1], 1, stride=stride, bias=False), nn.BatchNorm2d(widths[-1])
            )
        self.count = len(widths)
        for number, (out, kernel) in enumerate(zip(widths, kernels, strict=True)):
            conv = nn.Conv2d(width, out, kernel, strides.get(number, 1), padding=kernel // 2, bias=False)
            self.add_module(f"conv{number + 1}", conv)
            self.add_module(f"bn{number + 1}", nn.BatchNorm2d(out))
            width = out
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """The plain definition; `residual_block` computes the same with kernels."""
        shortcut = x if self.downsample is None else self.downsample(x)
        for number in range(1, self.count + 1):
            x = self.norm(number)(self.conv(number)(x))
            x = F.relu(x if number < self.count else x + shortcut)
        return x

    def conv(self, number: int) -> nn.Module:
        return self.get_submodule(f"conv{number}")

    def norm(self, number: int) -> nn.Module:
        return self.get_submodule(f"bn{number}")


def residual_block(block: Block, x: Tensor, shortcut: Tensor) -> tuple[Tensor, ...]:
    """The block by way of ops.norm_act.

    `x` and `shortcut` hold the same values, and so do the three results: one for the convolutions of the next block,
    one for its shortcut, one for the decoders. The kernel of the norm adds their gradients.
    """
    if block.downsample is not None:
        conv, norm = block.downsample
        shortcut = norm_act(norm, conv(shortcut), relu=False)
    for number in range(1, block.count):
        x = norm_act(block.norm(number), block.conv(number)(x))
    return norm_act_for(3, block.norm(block.count), block.conv(block.count)(x), shortcut)


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
