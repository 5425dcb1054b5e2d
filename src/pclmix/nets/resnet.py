"""Encoder Fe: a ResNet, cut before its pooling, giving a feature at each of five strides.

Module names are torchvision's (`conv1`, `layer1.0.conv2`, `layer2.0.downsample.0`, ...), so public weights fit by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from pclmix.kernels.ops import norm_act, norm_act_for
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
DEPTHS.register("resnet10")(Depth(BASIC, (1, 1, 1, 1), 1, (16, 32, 64, 128)))  # ours, thin: for a CPU
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
            # On the meta device there is nothing to fill, and torch would import its compiler to do so.
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
