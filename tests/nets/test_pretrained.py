"""Pretrained weights: folding keeps the features, and files that do not fit are refused by key."""

from __future__ import annotations

from pathlib import Path
from urllib.error import URLError

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from pclmix.errors import PclmixError
from pclmix.nets.encoder import ResNetEncoder
from pclmix.nets.pretrained import MEAN, STD, load_encoder_weights
from pclmix.nets.segmenter import build_segmenter

PUBLIC_FILE = Path(__file__).parents[2] / "../shared/weights/resnet50_imagenet_fp16.safetensors"


def reference(encoder: ResNetEncoder, colour: Tensor) -> list[Tensor]:
    """The colour network on (x - mean) / std, one channel at a time, padded with black as the folded does."""
    channels = []
    for c in range(3):
        padded = F.pad(colour[:, c], (3, 3, 3, 3))
        channels.append((padded - MEAN[c]) / STD[c])
    x = F.conv2d(torch.stack(channels, dim=1), encoder.conv1.weight, stride=2)
    x = torch.relu(encoder.bn1(x))
    features = [x]
    x = encoder.maxpool(x)
    for layer in (encoder.layer1, encoder.layer2, encoder.layer3, encoder.layer4):
        x = layer(x)
        features.append(x)
    return features


def lively(name: str, stride_in_1x1: bool = False) -> ResNetEncoder:
    """A colour encoder whose BatchNorm statistics are not the trivial ones."""
    torch.manual_seed(0)
    encoder = ResNetEncoder(name, 3, stride_in_1x1)
    for module in encoder.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2.0)
    return encoder.eval()


@pytest.mark.parametrize("in_channels", [1, 2, 3])
@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_folding_keeps_the_features(tmp_path: Path, in_channels: int, ending: str) -> None:
    colour = lively("resnet18")
    file = tmp_path / f"weights{ending}"
    state = {k: v for k, v in colour.state_dict().items() if ending == ".pth" or "num_batches" not in k}
    if ending == ".pth":
        torch.save(state | {"fc.weight": torch.zeros(10, 512), "fc.bias": torch.zeros(10)}, file)
    else:
        save_file(state, file)
    folded = ResNetEncoder("resnet18", in_channels).eval()
    load_encoder_weights(folded, str(file), in_channels)
    with torch.no_grad():
        grey = torch.rand(2, 1, 64, 64)
        x = torch.rand(2, 3, 64, 64) if in_channels == 3 else grey.expand(-1, in_channels, -1, -1)
        expected = reference(colour, x if in_channels == 3 else grey.expand(-1, 3, -1, -1))
        for feature, wanted in zip(folded(x), expected, strict=True):
            torch.testing.assert_close(feature, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not PUBLIC_FILE.exists(), reason="the public weights are not here")
def test_folding_the_public_weights() -> None:
    state = {key: value.float() for key, value in load_file(PUBLIC_FILE).items()}
    colour = ResNetEncoder("resnet50", 3, stride_in_1x1=True).eval()
    colour.load_state_dict(state, strict=False)
    folded = ResNetEncoder("resnet50", 1, stride_in_1x1=True).eval()
    load_encoder_weights(folded, str(PUBLIC_FILE), 1)
    with torch.no_grad():
        grey = torch.rand(1, 1, 96, 96)
        for feature, wanted in zip(folded(grey), reference(colour, grey.expand(-1, 3, -1, -1)), strict=True):
            torch.testing.assert_close(feature, wanted, rtol=1e-3, atol=1e-3)


def test_one_channel_half_precision_file(tmp_path: Path) -> None:
    saved = ResNetEncoder("resnet18", 1)
    torch.save({k: v.half() if v.is_floating_point() else v for k, v in saved.state_dict().items()}, tmp_path / "w.pth")
    loaded = ResNetEncoder("resnet18", 1)
    load_encoder_weights(loaded, str(tmp_path / "w.pth"), 1)
    assert loaded.conv1.weight.dtype == torch.float32
    torch.testing.assert_close(loaded.conv1.weight, saved.conv1.weight.half().float())


def test_a_partial_or_foreign_file_is_refused_with_its_keys(tmp_path: Path) -> None:
    state = ResNetEncoder("resnet18", 1).state_dict()
    state["layer9.weight"] = state.pop("layer4.1.conv2.weight")
    state["layer1.0.bn1.bias"] = torch.zeros(3)
    torch.save(state, tmp_path / "w.pth")
    encoder = ResNetEncoder("resnet18", 1)
    before = {k: v.clone() for k, v in encoder.state_dict().items()}
    with pytest.raises(PclmixError) as refusal:
        load_encoder_weights(encoder, str(tmp_path / "w.pth"), 1)
    text = str(refusal.value)
    assert "layer4.1.conv2.weight: missing" in text
    assert "layer9.weight: unknown" in text
    assert "layer1.0.bn1.bias: (3,) where (64,) is needed" in text
    assert all(torch.equal(before[k], v) for k, v in encoder.state_dict().items())


def test_another_depth_is_refused(tmp_path: Path) -> None:
    torch.save(ResNetEncoder("resnet34", 1).state_dict(), tmp_path / "w.pth")
    with pytest.raises(PclmixError, match="and 76 more"):
        load_encoder_weights(ResNetEncoder("resnet18", 1), str(tmp_path / "w.pth"), 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.pth", None, "no such file"),
        ("weights.txt", b"1", r"must be none, imagenet, or a \.pth"),
        ("damaged.pth", b"not a pickle", "cannot be read"),
        ("empty.pth", b"", "cannot be read"),
        ("damaged.safetensors", b"\xff" * 40, "cannot be read"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(PclmixError, match=message):
        load_encoder_weights(ResNetEncoder("resnet18", 1), str(tmp_path / name), 1)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    torch.save({"conv1.weight": Path("x")}, tmp_path / "w.pth")
    with pytest.raises(PclmixError, match="cannot be read"):
        load_encoder_weights(ResNetEncoder("resnet18", 1), str(tmp_path / "w.pth"), 1)


def test_something_else_than_tensors(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(PclmixError, match="plain state dict"):
        load_encoder_weights(ResNetEncoder("resnet18", 1), str(tmp_path / "w.pth"), 1)


def test_imagenet_offline_says_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    with pytest.raises(PclmixError, match=r"resnet18-f37072fd\.pth.*encoder\.weights=FILE"):
        load_encoder_weights(ResNetEncoder("resnet18", 1), "imagenet", 1)


def test_imagenet_comes_through_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = lively("resnet18")
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *a, **k: dict(colour.state_dict()))
    encoder = ResNetEncoder("resnet18", 1)
    load_encoder_weights(encoder, "imagenet", 1)
    assert torch.equal(encoder.layer4[1].conv2.weight, colour.layer4[1].conv2.weight)


def test_imagenet_and_the_other_stride_exclude_each_other() -> None:
    with pytest.raises(PclmixError, match="stride_in_1x1=false"):
        load_encoder_weights(ResNetEncoder("resnet50", 1, stride_in_1x1=True), "imagenet", 1)


def test_a_network_without_public_weights() -> None:
    encoder = build_segmenter("unet", 1, 4).encoder
    load_encoder_weights(encoder, "none", 1)
    with pytest.raises(PclmixError, match="needs a resnet"):
        load_encoder_weights(encoder, "imagenet", 1)
