"""Encoder Fe: MONAI's ResNet, cut before its pooling, giving a feature at each of five strides.

Module names are torchvision's (`conv1`, `layer1.0.conv2`, `layer2.0.downsample.0`, ...), so public weights fit by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from pclmix.errors import PclmixError
from pclmix.nets.norm_act import convolve, norm_act, norm_act_for
from pclmix.registry import Registry


@dataclass(frozen=True)
class Depth:
    """Which block a ResNet is made of, how many of them each layer has, and how wide they are."""

    block: str
    layers: tuple[int, int, int, int]
    expansion: int
    widths: tuple[int, int, int, int] = (64, 128, 256, 512)


DEPTHS: Registry[Depth] = Registry("encoder")
DEPTHS.register("resnet10")(Depth("basic", (1, 1, 1, 1), 1, (16, 32, 64, 128)))  # ours, thin: for a CPU
DEPTHS.register("resnet18")(Depth("basic", (2, 2, 2, 2), 1))
DEPTHS.register("resnet34")(Depth("basic", (3, 4, 6, 3), 1))
DEPTHS.register("resnet50")(Depth("bottleneck", (3, 4, 6, 3), 4))


class Encoder(nn.Module):
    """What a decoder may rely on: features finest first, with these channels at these strides."""

    channels: tuple[int, ...]
    strides: tuple[int, ...]


class ResNetEncoder(Encoder):
    """A ResNet by name: image (B, C, H, W) to features at strides 2, 4, 8, 16, 32.

    Channels are 64, 256, 512, 1024, 2048 for resnet50, 64, 64, 128, 256, 512 for resnet18 and resnet34.
    `stride_in_1x1` moves the stride of layers 2 to 4 from the 3x3 to the first 1x1 convolution (some public weights
    were trained so); only resnet50 has that convolution. The layout of the weights is the same, the features are not.
    """

    strides = (2, 4, 8, 16, 32)

    def __init__(self, name: str, in_channels: int, stride_in_1x1: bool = False) -> None:
        super().__init__()
        depth = DEPTHS.find(name)
        if stride_in_1x1 and depth.block != "bottleneck":
            raise PclmixError(f"encoder.stride_in_1x1=true needs resnet50: {name} has no 1x1 convolution to stride")
        # Imported here: MONAI takes seconds to import, and nothing else of the package needs it.
        from monai.networks.nets.resnet import ResNet

        self.name = name
        self.stride_in_1x1 = stride_in_1x1
        self.channels = (depth.widths[0], *(width * depth.expansion for width in depth.widths))
        # MONAI's own resnet18 and resnet34 pad the shortcut with zeros; shortcut "B" is the convolution of torchvision.
        body = ResNet(
            block=depth.block,
            layers=list(depth.layers),
            block_inplanes=list(depth.widths),
            spatial_dims=2,
            n_input_channels=in_channels,
            conv1_t_stride=2,
            shortcut_type="B",
            bias_downsample=False,
            feed_forward=False,
        )
        self.conv1: nn.Conv2d = body.conv1
        self.bn1: nn.BatchNorm2d = body.bn1
        self.act: nn.Module = body.act
        self.maxpool: nn.Module = body.maxpool
        self.layer1: nn.Sequential = body.layer1
        self.layer2: nn.Sequential = body.layer2
        self.layer3: nn.Sequential = body.layer3
        self.layer4: nn.Sequential = body.layer4
        if stride_in_1x1:
            _stride_in_first_convolution([self.layer2, self.layer3, self.layer4])

    def forward(self, x: Tensor) -> list[Tensor]:
        x, feature = norm_act_for(2, self.bn1, self.conv1(x))
        features = [feature]
        x = shortcut = self.maxpool(x)
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in layer:
                x, shortcut, feature = residual_block(block, x, shortcut)
            features.append(feature)
        return features


def residual_block(block: nn.Module, x: Tensor, shortcut: Tensor) -> tuple[Tensor, ...]:
    """What MONAI's block computes (two or three convolutions with BatchNorm, shortcut, ReLU), with norm_act.

    `shortcut` is x, too, and so are the three results one map: for the next block's convolutions, for its shortcut, and
    for whoever reads the feature.
    """
    parts = dict(block.named_children())
    if "downsample" in parts:
        conv, norm = parts["downsample"].children()
        shortcut = norm_act(norm, convolve(conv, shortcut), relu=False)
    *first, last = sorted(name for name in parts if name.startswith("conv"))
    for name in first:
        x = norm_act(parts[name.replace("conv", "bn")], convolve(parts[name], x))
    return norm_act_for(3, parts[last.replace("conv", "bn")], convolve(parts[last], x), shortcut)


def _stride_in_first_convolution(layers: Sequence[nn.Sequential]) -> None:
    for layer in layers:
        conv1, conv2 = layer[0].get_submodule("conv1"), layer[0].get_submodule("conv2")
        assert isinstance(conv1, nn.Conv2d)
        assert isinstance(conv2, nn.Conv2d)
        conv1.stride, conv2.stride = conv2.stride, conv1.stride
