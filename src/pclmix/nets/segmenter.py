"""The network that predicts: an encoder and one CNN decoder. It neither needs nor imports the transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from pclmix.errors import PclmixError
from pclmix.nets.decoder import Decoder
from pclmix.nets.encoder import DEPTHS, Encoder, ResNetEncoder
from pclmix.nets.unet import FamilyDecoder, UNetEncoder
from pclmix.nets.unet_decoder import UNetDecoder
from pclmix.registry import Registry


class Segmenter(nn.Module):
    """Image (B, C, H, W) to logits (B, K, H, W); sides must be multiples of the encoder's coarsest stride."""

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    @property
    def multiple(self) -> int:
        """What both sides of an input must be a multiple of."""
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
    """How an encoder (of input channels and stride_in_1x1) and a decoder for it (of channels and classes) are made."""

    encoder: Callable[[int, bool], Encoder]
    decoder: Callable[[Sequence[int], int], Decoder]


NETS: Registry[Net] = Registry("network")


def _unet_encoder(in_channels: int, stride_in_1x1: bool) -> Encoder:
    if stride_in_1x1:
        raise PclmixError("encoder.stride_in_1x1=true needs resnet50: unet has no strided convolution")
    return UNetEncoder(in_channels)


def _resnet_encoder(name: str) -> Callable[[int, bool], Encoder]:
    return lambda in_channels, stride_in_1x1: ResNetEncoder(name, in_channels, stride_in_1x1)


NETS.register("unet")(Net(_unet_encoder, FamilyDecoder))
for _name in DEPTHS.names():
    NETS.register(_name)(Net(_resnet_encoder(_name), UNetDecoder))


def build_segmenter(net: str, in_channels: int, classes: int, stride_in_1x1: bool = False) -> Segmenter:
    """A network by name, randomly initialised from torch's global generator; `classes` counts the background."""
    entry = NETS.find(net)
    encoder = entry.encoder(in_channels, stride_in_1x1)
    return Segmenter(encoder, entry.decoder(encoder.channels, classes))


def build_decoder(net: str, encoder: Encoder, classes: int) -> Decoder:
    """A second CNN decoder of the kind that `net` has, for the features of `encoder`."""
    return NETS.find(net).decoder(encoder.channels, classes)
