"""The network that predicts: an encoder and one CNN decoder. It does not import the transformer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from pclmix.errors import PclmixError
from pclmix.nets.cnn import DEPTHS, Decoder, Encoder, FamilyDecoder, ResNetEncoder, UNetDecoder, UNetEncoder
from pclmix.registry import Registry


def device_kind(name: str) -> Literal["cpu", "cuda"]:
    """`auto` is the GPU if there is one; an absent device is refused."""
    if name not in ("auto", "cpu", "cuda"):
        raise PclmixError(f"--device {name} is not known; use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise PclmixError("--device cuda: no CUDA device can be used here; use --device cpu, or check the driver")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


class Segmenter(nn.Module):
    """Image (B, C, H, W) to logits (B, K, H, W); sides must be multiples of the encoder's coarsest stride."""

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    @property
    def multiple(self) -> int:
        """Both sides of an input must be multiples of this."""
        return self.encoder.strides[-1]

    def features(self, x: Tensor) -> list[Tensor]:
        check_side(x.shape[-2], x.shape[-1], self.multiple)
        features: list[Tensor] = self.encoder(x)
        return features

    def decode(self, features: Sequence[Tensor]) -> Tensor:
        logits: Tensor = self.decoder(features)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.features(x))


def check_side(height: int, width: int, multiple: int) -> None:
    """Refuse an image size that the strides of a network do not divide."""
    if height % multiple or width % multiple or not height or not width:
        raise PclmixError(
            f"an image of {height}x{width} does not fit the network: both sides must be multiples of {multiple}. "
            f"Nearest larger: {-(-max(height, 1) // multiple) * multiple}x{-(-max(width, 1) // multiple) * multiple}"
        )


@dataclass(frozen=True)
class Net:
    """Factories of an encoder (by input channels) and its decoder (by channels and classes)."""

    encoder: Callable[[int], Encoder]
    decoder: Callable[[Sequence[int], int], Decoder]


NETS: Registry[Net] = Registry("network")


NETS.register("unet")(Net(UNetEncoder, FamilyDecoder))
for _name in DEPTHS.names():
    NETS.register(_name)(Net(partial(ResNetEncoder, _name), UNetDecoder))


def build_segmenter(net: str, in_channels: int, classes: int) -> Segmenter:
    """A network by name, randomly initialised from torch's global generator; `classes` counts the background."""
    entry = NETS.find(net)
    encoder = entry.encoder(in_channels)
    return Segmenter(encoder, entry.decoder(encoder.channels, classes))


def build_decoder(net: str, encoder: Encoder, classes: int) -> Decoder:
    """A second CNN decoder of the kind that `net` has, for the features of `encoder`."""
    return NETS.find(net).decoder(encoder.channels, classes)


class Ensemble(nn.Module):
    """Several networks as one: logits (B, K, H, W) whose softmax is the mean of the networks' softmax."""

    def __init__(self, nets: Iterable[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, image: Tensor) -> Tensor:
        logs = torch.stack([net(image).float().log_softmax(1) for net in self.nets])
        return logs.logsumexp(0) - math.log(len(self.nets))  # not a tensor constant, which a CUDA graph cannot copy


def fold_batchnorm(module: nn.Module) -> nn.Module:
    """Fold, in place, every BatchNorm that follows a convolution; returns the module, in evaluation mode.

    Pairs are found by position in a Sequential, elsewhere by name: `bn1` follows `conv1`, as in every ResNet. The
    result equals the original up to rounding and is for prediction only; its state dict has other keys.
    """
    module.eval()
    for parent in module.modules():
        children = dict(parent.named_children())
        if isinstance(parent, nn.Sequential):
            pairs = list(pairwise(children))
        else:
            pairs = [(name, name.replace("conv", "bn")) for name in children if name.startswith("conv")]
        for first, second in pairs:
            conv, norm = children[first], children.get(second)
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(parent, first, fuse_conv_bn_eval(conv, norm))
                setattr(parent, second, nn.Identity())
    return module


def count_parameters(module: nn.Module) -> int:
    """Trainable values of `module`; a parameter used in two places counts once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
