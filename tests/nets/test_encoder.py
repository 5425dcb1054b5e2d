"""The encoder against MONAI's independent ResNet."""

from __future__ import annotations

import pytest
import torch
from monai.networks.nets.resnet import ResNet

from pclmix.nets.cnn import BASIC, DEPTHS, ResNetEncoder


def theirs(name: str, channels: int) -> ResNet:
    depth = DEPTHS.find(name)
    return ResNet(
        block="basic" if depth.kernels == BASIC else "bottleneck",
        layers=list(depth.layers),
        block_inplanes=list(depth.widths),
        spatial_dims=2,
        n_input_channels=channels,
        conv1_t_stride=2,
        shortcut_type="B",
        bias_downsample=False,
        feed_forward=False,
    )


@pytest.mark.parametrize("name", [name for name in DEPTHS.names() if name != "resnet50v1"])
def test_names_first_weights_and_features_are_those_of_a_resnet(name: str) -> None:
    torch.manual_seed(3)
    encoder = ResNetEncoder(name, 2).eval()
    torch.manual_seed(3)
    body = theirs(name, 2).eval()
    ours = encoder.state_dict()
    assert list(ours) == list(body.state_dict())
    assert all(torch.equal(tensor, ours[key]) for key, tensor in body.state_dict().items())
    x = torch.randn(2, 2, 64, 96)
    features = encoder(x)
    assert [f.shape[1] for f in features] == list(encoder.channels)
    y = body.act(body.bn1(body.conv1(x)))
    torch.testing.assert_close(features[0], y)
    y = body.maxpool(y)
    for feature, layer in zip(features[1:], (body.layer1, body.layer2, body.layer3, body.layer4), strict=True):
        y = layer(y)
        torch.testing.assert_close(feature, y)


def test_resnet50v1_strides_on_the_first_convolution() -> None:
    torch.manual_seed(3)
    encoder = ResNetEncoder("resnet50v1", 1).eval()
    torch.manual_seed(3)
    body = theirs("resnet50", 1).eval()
    for layer in (body.layer2, body.layer3, body.layer4):
        layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    x = torch.randn(1, 1, 64, 64)
    y = body.maxpool(body.act(body.bn1(body.conv1(x))))
    for layer in (body.layer1, body.layer2, body.layer3, body.layer4):
        y = layer(y)
    torch.testing.assert_close(encoder(x)[-1], y)
