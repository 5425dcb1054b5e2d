"""Pretrained weights: folding keeps the features, and files that do not fit are refused by key."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from skimage import data
from torch import Tensor

from pclmix.errors import PclmixError
from pclmix.nets.cnn import ResNetEncoder
from pclmix.nets.segmenter import build_segmenter
from pclmix.nets.weights import MEAN, STD, adapt_input, fitting_net, load_encoder_weights, strides_on_1x1

PUBLIC_FILE = Path(__file__).parents[2] / "../shared/weights/resnet50_imagenet_fp16.safetensors"
NO_FILE = f"needs ../shared/weights/{PUBLIC_FILE.name}"


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


def lively(name: str) -> ResNetEncoder:
    """A colour encoder whose BatchNorm statistics are not the trivial ones."""
    torch.manual_seed(0)
    encoder = ResNetEncoder(name, 3)
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


@pytest.mark.skipif(not PUBLIC_FILE.exists(), reason=NO_FILE)
def test_folding_the_public_weights() -> None:
    state = {key: value.float() for key, value in load_file(PUBLIC_FILE).items()}
    colour = ResNetEncoder("resnet50v1", 3).eval()
    colour.load_state_dict(state, strict=False)
    folded = ResNetEncoder("resnet50v1", 1).eval()
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


def test_refuses_partial_or_foreign_files_by_key(tmp_path: Path) -> None:
    state = ResNetEncoder("resnet18", 1).state_dict()
    state["layer9.weight"] = state.pop("layer4.1.conv2.weight")
    state["layer1.0.bn1.bias"] = torch.zeros(3)
    torch.save(state, tmp_path / "w.pth")
    encoder = ResNetEncoder("resnet18", 1)
    before = {k: v.clone() for k, v in encoder.state_dict().items()}
    with pytest.raises(PclmixError) as refusal:
        load_encoder_weights(encoder, str(tmp_path / "w.pth"), 1)
    text = str(refusal.value)
    assert "layer4.1.conv2.weight" in text
    assert "layer9.weight" in text
    assert "layer1.0.bn1.bias: (3,)" in text
    assert all(torch.equal(before[k], v) for k, v in encoder.state_dict().items())


def test_refuses_weights_of_another_depth(tmp_path: Path) -> None:
    torch.save(ResNetEncoder("resnet34", 1).state_dict(), tmp_path / "w.pth")
    with pytest.raises(PclmixError, match=r"\b76\b"):
        load_encoder_weights(ResNetEncoder("resnet18", 1), str(tmp_path / "w.pth"), 1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("absent.pth", None),
        ("weights.txt", b"1"),
        ("damaged.pth", b"not a pickle"),
        ("empty.pth", b""),
        ("damaged.safetensors", b"\xff" * 40),
        ("pickle.pth", pickle.dumps(print, protocol=4)),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes | None, recwarn: pytest.WarningsRecorder) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(PclmixError, match=re.escape(name)) as caught:
        load_encoder_weights(ResNetEncoder("resnet18", 1), str(tmp_path / name), 1)
    assert "weights_only" not in str(caught.value)
    assert not recwarn.list


def test_never_runs_code_from_a_file(tmp_path: Path) -> None:
    torch.save({"conv1.weight": Path("x")}, tmp_path / "w.pth")
    with pytest.raises(PclmixError, match=r"w\.pth"):
        load_encoder_weights(ResNetEncoder("resnet18", 1), str(tmp_path / "w.pth"), 1)


def test_refuses_files_without_tensors(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(PclmixError, match=r"w\.pth"):
        load_encoder_weights(ResNetEncoder("resnet18", 1), str(tmp_path / "w.pth"), 1)


def test_imagenet_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    with pytest.raises(PclmixError, match=r"resnet18-f37072fd\.pth.*encoder\.weights=FILE"):
        load_encoder_weights(ResNetEncoder("resnet18", 1), "imagenet", 1)


def test_imagenet_uses_the_hub_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = lively("resnet18")
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *a, **k: dict(colour.state_dict()))
    encoder = ResNetEncoder("resnet18", 1)
    load_encoder_weights(encoder, "imagenet", 1)
    assert torch.equal(encoder.layer4[1].conv2.weight, colour.layer4[1].conv2.weight)


@pytest.mark.parametrize("name", ["resnet10", "resnet50v1"])
def test_imagenet_needs_a_network_with_public_weights(name: str) -> None:
    with pytest.raises(PclmixError, match=r"encoder\.weights=imagenet"):
        load_encoder_weights(ResNetEncoder(name, 1), "imagenet", 1)


@pytest.mark.skipif(not PUBLIC_FILE.exists(), reason=NO_FILE)
def test_recognises_the_version_of_the_public_weights() -> None:
    assert fitting_net("resnet50", str(PUBLIC_FILE)) == "resnet50v1"
    assert fitting_net("resnet50v1", str(PUBLIC_FILE)) == "resnet50v1"
    assert fitting_net("resnet34", str(PUBLIC_FILE)) == "resnet34"


@pytest.mark.skipif(not PUBLIC_FILE.exists(), reason=NO_FILE)
@pytest.mark.parametrize("name", ["resnet50", "resnet50v1"])
def test_recognises_the_version_of_trained_weights_by_their_statistics(name: str) -> None:
    """The public weights with their statistics computed again, on other photographs, in each version."""
    encoder = ResNetEncoder(name, 3)
    encoder.load_state_dict({key: value.float() for key, value in load_file(PUBLIC_FILE).items()}, strict=False)
    images = (data.immunohistochemistry(), data.retina(), data.camera(), data.hubble_deep_field(), data.coins())
    assert strides_on_1x1(with_statistics(encoder, images)) is (name == "resnet50v1")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["resnet50", "resnet50v1"])
def test_recognises_the_version_of_smooth_and_rough_kernels(tmp_path: Path, name: str, channels: int) -> None:
    """Random weights except in one layer, whose outputs vary less if the pixels it sees are farther apart."""
    torch.manual_seed(0)
    encoder = ResNetEncoder(name, 3)
    kernel = encoder.layer2[0].conv2.weight
    smooth, rough = torch.ones(3, 3), torch.tensor([[-1.0, -2, -1], [0, 0, 0], [1, 2, 1]])
    with torch.no_grad():
        kernel.copy_(torch.randn(*kernel.shape[:2], 1, 1) * smooth)
        kernel[::2] = torch.randn(len(kernel[::2]), kernel.shape[1], 1, 1) * rough
    state = with_statistics(encoder, (data.camera(), data.coins(), data.retina()))
    file = tmp_path / "w.pth"
    torch.save(state if channels == 3 else adapt_input(state, 1), file)
    assert fitting_net("resnet50", str(file)) == name
    # A resumed run needs no file.
    assert fitting_net("resnet50", str(tmp_path / "gone.pth"), known=name) == name


def with_statistics(encoder: ResNetEncoder, images: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """The weights of a colour encoder with the statistics that the images give, for (x - mean) / std."""
    batch = []
    for image in images:
        x = torch.from_numpy(image.copy()).float() / 255
        x = x.expand(3, -1, -1) if x.ndim == 2 else x.permute(2, 0, 1)
        batch.append(F.interpolate(x[None], size=(128, 128), mode="area")[0])
    for module in encoder.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
            module.reset_running_stats()
    x = torch.stack(batch)
    with torch.no_grad():
        encoder.train()((x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1))
    return {key: value for key, value in encoder.state_dict().items() if "num_batches" not in key}


def test_version_of_weights_that_do_not_fit(tmp_path: Path) -> None:
    torch.save(ResNetEncoder("resnet18", 1).state_dict(), tmp_path / "w.pth")
    assert fitting_net("resnet50", str(tmp_path / "w.pth")) == "resnet50"


def test_unet_has_no_public_weights() -> None:
    encoder = build_segmenter("unet", 1, 4).encoder
    load_encoder_weights(encoder, "none", 1)
    with pytest.raises(PclmixError, match="needs a resnet"):
        load_encoder_weights(encoder, "imagenet", 1)
