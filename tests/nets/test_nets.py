"""Every network by name: shapes, strides, parameters, and what prediction leaves out."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from pclmix.errors import PclmixError
from pclmix.methods.base import Task
from pclmix.methods.pclmix import PCLMix, PCLMixParams
from pclmix.nets.cnn import ResNetEncoder
from pclmix.nets.segmenter import NETS, Segmenter, build_decoder, build_segmenter, count_parameters
from pclmix.nets.swin import forward_dual


def build_pclmix(net: str) -> PCLMix:
    return PCLMix(Task(net, 1, 4, (64, 64)), PCLMixParams()).train()


@pytest.fixture(scope="module")
def dual() -> PCLMix:
    torch.manual_seed(0)
    return build_pclmix("resnet18")


@pytest.mark.parametrize("net", NETS.names())
def test_features_and_logits(net: str) -> None:
    model = build_segmenter(net, in_channels=2, classes=3).eval()
    x = torch.randn(1, 2, 96, 64)
    with torch.no_grad():
        features = model.features(x)
        logits = model.decode(features)
        assert torch.equal(model(x), logits)
    assert [f.shape[1] for f in features] == list(model.encoder.channels)
    assert [(96 // f.shape[2], 64 // f.shape[3]) for f in features] == [(s, s) for s in model.encoder.strides]
    assert logits.shape == (1, 3, 96, 64)


@pytest.mark.parametrize("side", [32, 64, 96, 224, 256])
def test_both_decoders_at_several_sizes(dual: PCLMix, side: int) -> None:
    with torch.no_grad():
        logits_c, logits_t, embeddings = forward_dual(dual.net, dual.aux, dual.head, torch.randn(3, 1, side, side), 2)
    assert logits_c.shape == logits_t.shape == (3, 4, side, side)
    assert embeddings.shape == (2, 256, side // 8, side // 8)
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(2, side // 8, side // 8))
    assert logits_c.isfinite().all()
    assert logits_t.isfinite().all()


def test_encoder_widths_and_the_place_of_the_stride() -> None:
    usual, variant = ResNetEncoder("resnet50", 1).eval(), ResNetEncoder("resnet50v1", 1).eval()
    assert usual.channels == (64, 256, 512, 1024, 2048)
    assert usual.strides == (2, 4, 8, 16, 32)
    variant.load_state_dict(usual.state_dict())
    x = torch.randn(1, 1, 64, 64)
    with torch.no_grad():
        a, b = usual(x), variant(x)
    assert [f.shape for f in a] == [f.shape for f in b]
    assert torch.equal(a[1], b[1])
    assert not torch.allclose(a[2], b[2])
    for layer in (variant.layer2, variant.layer3, variant.layer4):
        assert layer[0].conv1.stride == (2, 2)
        assert layer[0].conv2.stride == (1, 1)


def test_parameter_counts() -> None:
    """torchvision's resnet50 has 25 557 032 with its classifier of 2 049 000 and a first kernel of three channels."""
    model = build_pclmix("resnet50")
    assert count_parameters(model.net.encoder) == 25_557_032 - 2_049_000 - 2 * 64 * 49
    assert count_parameters(model.net.decoder) == 9_013_508
    assert count_parameters(model.aux) == 23_033_950
    assert count_parameters(model.head) == 394_496
    assert count_parameters(build_segmenter("unet", 1, 4)) == 1_813_764
    model.head.requires_grad_(False)
    assert count_parameters(model.head) == 0


def test_inference_weights_lie_under_net(dual: PCLMix) -> None:
    torch.manual_seed(1)
    alone = build_segmenter("resnet18", 1, 4).eval()
    inference = {key.removeprefix("net."): value for key, value in dual.state_dict().items() if key.startswith("net.")}
    alone.load_state_dict(inference)
    assert {key.split(".")[0] for key in dual.state_dict()} == {"net", "aux", "head", "queue"}
    dual.eval()
    x = torch.randn(2, 1, 64, 64)
    with torch.no_grad():
        assert torch.equal(alone(x), dual(x)[0])
    dual.train()


def test_prediction_imports_no_transformer() -> None:
    code = (
        "import sys, torch\n"
        "from pclmix.nets.segmenter import build_segmenter\n"
        "build_segmenter('resnet18', 1, 4)(torch.zeros(2, 1, 32, 32))\n"
        "print([m for m in sys.modules if m.startswith('pclmix.nets') and ('swin' in m or 'dual' in m)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_reach_every_parameter(dual: PCLMix, bf16: bool) -> None:
    dual.zero_grad()
    x = torch.randn(3, 1, 64, 64).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        out = forward_dual(dual.net, dual.aux, dual.head, x, 2)
    sum((o.float() * torch.randn_like(o, dtype=torch.float32)).sum() for o in out).backward()
    grads = {name: parameter.grad for name, parameter in dual.named_parameters()}
    silent = [name for name, grad in grads.items() if grad is None or not grad.isfinite().all() or not grad.any()]
    assert silent == []


def test_bf16_is_close_to_float32(dual: PCLMix) -> None:
    dual.eval()
    x = torch.randn(2, 1, 64, 64)
    with torch.no_grad():
        exact = forward_dual(dual.net, dual.aux, dual.head, x, 1)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = forward_dual(dual.net, dual.aux, dual.head, x, 1)
    dual.train()
    for a, b in zip(exact, rounded, strict=True):
        assert (a - b.float()).abs().max() < 0.05 * a.abs().max()


def test_refuses_sizes_that_strides_do_not_divide() -> None:
    with pytest.raises(PclmixError, match=r"100x64.*\b32\b.*128x64"):
        build_segmenter("resnet18", 1, 2)(torch.zeros(2, 1, 100, 64))
    with pytest.raises(PclmixError, match=r"40x64.*\b16\b"):
        build_segmenter("unet", 1, 2)(torch.zeros(2, 1, 40, 64))


def test_refuses_unknown_networks() -> None:
    with pytest.raises(PclmixError, match="'resnet50'"):
        build_segmenter("resnet5", 1, 2)
    with pytest.raises(PclmixError, match=r"net=.*resnet"):
        build_pclmix("unet")


@pytest.mark.parametrize("net", ["unet", "resnet18"])
def test_a_second_decoder_on_the_same_features(net: str) -> None:
    model = build_segmenter(net, 1, 3)
    second = build_decoder(net, model.encoder, 3)
    x = torch.randn(2, 1, 32, 32)
    assert second(model.features(x)).shape == (2, 3, 32, 32)


def test_unet_dropout_grows_with_depth() -> None:
    model = build_segmenter("unet", 1, 3)
    rates = [m.p for m in model.encoder.modules() if isinstance(m, nn.Dropout)]
    assert rates == [0.05, 0.1, 0.2, 0.3, 0.5]


def test_segmenter_of_given_encoder_and_decoder() -> None:
    encoder = ResNetEncoder("resnet18", 1)
    model = Segmenter(encoder, build_decoder("resnet18", encoder, 5))
    assert model.multiple == 32
