"""A checkpoint as a predictor: the trained CNN branch, nothing of the transformer, labels at the image's own size."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pclmix
from pclmix.data.preprocess import Preprocessing, intensity_range
from pclmix.errors import PclmixError
from pclmix.inference import About, load
from pclmix.inference.torch import TorchPredictor
from pclmix.io.volume import read_image
from pclmix.labels import Labels, largest_component
from pclmix.methods.base import build_method
from pclmix.nets.cnn import ResNetEncoder
from pclmix.nets.swin import forward_dual
from pclmix.nets.weights import load_encoder_weights
from pclmix.training.checkpoint import LAST, PREVIOUS, load_checkpoint, trained_state


@pytest.fixture(scope="module")
def predictor(lively_model: Path) -> TorchPredictor:
    found = load(lively_model, device="cpu")
    assert isinstance(found, TorchPredictor)
    return found


@pytest.fixture(scope="module")
def volume(phantom_dataset: Path) -> np.ndarray:
    """A part of a phantom, 5 slices of 70 x 50."""
    return read_image(phantom_dataset / "imagesTr" / "phantom001_frame01_0000.nii.gz").array[0, 1:6, 20:90, 30:80]


def made_of(net: torch.nn.Module, batch: int = 2, intensity: str = "slice", channels: int = 1) -> TorchPredictor:
    about = About(
        "test",
        "",
        Labels(("background", "a", "b"), None),
        ("x",) * channels,
        (8, 8),
        intensity,  # type: ignore[arg-type]
    )
    return TorchPredictor(about, net, torch.device("cpu"), batch=batch)


def test_same_logits_as_the_cnn_branch_of_the_whole_method(
    lively_model: Path, predictor: TorchPredictor, volume: np.ndarray
) -> None:
    checkpoint = load_checkpoint(lively_model)
    method = build_method(checkpoint.config, 1, 4)
    method.load_state_dict(trained_state(checkpoint))
    method.eval()
    slices = torch.from_numpy(predictor.about.preprocessing.images(volume[None]).copy())
    with torch.no_grad():
        full = forward_dual(method.net, method.aux, method.head, slices, len(slices)).logits_c.numpy()
    expected = predictor.about.preprocessing.restored(full, (70, 50))
    np.testing.assert_allclose(predictor.logits(volume), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    assert (predictor.predict(volume) == expected.argmax(1)).mean() > 0.999


def test_no_transformer_is_imported_or_built(tiny_run: Path) -> None:
    code = (
        "import sys; from pclmix.inference import load; p = load(sys.argv[1], device='cpu');"
        "bad = [m for m in sys.modules if m.startswith('pclmix.') and ('swin' in m or 'dual' in m or 'methods' in m)];"
        "assert not bad, bad; assert not [n for n, _ in p.net.named_modules() if 'swin' in n or 'aux' in n]"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_run)], check=True)


def test_predictor_attributes(tiny_run: Path, predictor: TorchPredictor) -> None:
    about = predictor.about
    assert about.labels.names == ("background", "RV", "Myo", "LV")
    assert about.channels == ("MRI",)
    assert about.size == (64, 64)
    assert about.trained_on == tuple(f"phantom{p:03d}_frame{f:02d}" for p in (2, 3) for f in (1, 2))
    run, last = (load(path, device="cpu").about for path in (tiny_run, tiny_run / LAST))
    assert run.identity == last.identity != about.identity


def test_labels_are_the_largest_of_the_resized_scores(predictor: TorchPredictor, volume: np.ndarray) -> None:
    labels = predictor.predict(volume, (8.0, 1.5, 1.5))
    assert labels.shape == volume.shape
    assert labels.dtype == np.uint8
    assert len(np.unique(labels)) == 4
    np.testing.assert_array_equal(labels, predictor.logits(volume).argmax(1))
    probabilities = predictor.probabilities(volume)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    np.testing.assert_array_equal(labels, probabilities.argmax(1))


def test_flips_are_a_plain_mean(predictor: TorchPredictor, volume: np.ndarray) -> None:
    slices = torch.from_numpy(predictor.about.preprocessing.images(volume[None]).copy())
    total = torch.zeros(())
    with torch.no_grad():
        for axes in ([], [2], [3], [2, 3]):
            turned = torch.flip(slices, axes) if axes else slices
            p = predictor.net(turned).softmax(1)
            total = total + (torch.flip(p, axes) if axes else p) / 4
    expected = predictor.about.preprocessing.restored(total.numpy(), (70, 50))
    np.testing.assert_allclose(predictor.probabilities(volume, tta="flip"), expected, atol=1e-5)
    flipped = predictor.predict(volume, tta="flip")
    assert (flipped == expected.argmax(1)).mean() > 0.999
    assert (flipped != predictor.predict(volume)).mean() > 0.01


def test_largest_component(predictor: TorchPredictor, volume: np.ndarray) -> None:
    raw = predictor.predict(volume)
    kept = predictor.predict(volume, largest_component=True)
    np.testing.assert_array_equal(kept, largest_component(raw, (1, 2, 3)))
    assert (kept != raw).any()


class Threshold(torch.nn.Module):
    """Class 1 where the first channel is above one half, 0 elsewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :1]
        return torch.cat([0.5 - x, x - 0.5, torch.full_like(x, -9.0)], dim=1)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 7), st.integers(1, 4), st.sampled_from(["slice", "volume"]), st.integers(0, 99))
def test_batches_do_not_change_the_result(count: int, batch: int, intensity: str, seed: int) -> None:
    image = np.random.default_rng(seed).normal(size=(2, count, 13, 6))
    one = made_of(Threshold(), 100, intensity, channels=2).predict(image)
    np.testing.assert_array_equal(made_of(Threshold(), batch, intensity, channels=2).predict(image), one)


def test_a_part_of_a_volume_is_scaled_by_the_whole() -> None:
    image = np.random.default_rng(0).integers(-50, 700, (1, 4, 8, 8))
    whole = Preprocessing((8, 8), "volume").images(image)
    limits = intensity_range(image, "volume")
    np.testing.assert_array_equal(Preprocessing((8, 8), "volume").images(image[:, 1:3], limits), whole[1:3])


def test_native_scores_are_held_a_few_slices_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    image = np.random.default_rng(0).random((5, 30, 40))
    expected = made_of(Threshold(), 5).predict(image)
    monkeypatch.setattr("pclmix.inference.torch.SCORES_AT_ONCE", 3 * 30 * 40 * 2)
    seen: list[int] = []
    predictor = made_of(Threshold(), 5)
    resize = predictor._resize
    monkeypatch.setattr(predictor, "_resize", lambda s, size: (seen.append(len(s)), resize(s, size))[1])
    np.testing.assert_array_equal(predictor.predict(image), expected)
    assert seen == [2, 2, 1]


def test_prediction_never_synchronises(predictor: TorchPredictor, no_sync: Callable[[], object]) -> None:
    slices = torch.rand(3, 1, 64, 64)
    predictor.compute(slices, (70, 50))
    with no_sync():  # type: ignore[attr-defined]
        predictor.compute(slices, (70, 50), "flip")


@pytest.mark.parametrize(
    ("shape", "channels", "spatial"),
    [
        ((30, 20), 1, (30, 20)),
        ((2, 30, 20), 1, (2, 30, 20)),
        ((1, 2, 30, 20), 1, (2, 30, 20)),
        ((30, 20, 3), 3, (30, 20)),
        ((3, 20, 3), 1, (3, 20, 3)),
        ((3, 2, 30, 20), 3, (2, 30, 20)),
        ((30, 20, 2), 2, (30, 20)),
    ],
)
def test_labels_have_the_spatial_shape_of_the_image(
    shape: tuple[int, ...], channels: int, spatial: tuple[int, ...]
) -> None:
    image, model = np.random.default_rng(0).random(shape), made_of(Threshold(), channels=channels)
    assert model.predict(image).shape == model.predict(image, largest_component=True).shape == spatial
    found = model.examine(image)
    assert found.labels.shape == found.entropy.shape == found.second.shape == spatial
    assert model.probabilities(image).shape == (*spatial[:-2], 3, *spatial[-2:])


def test_array_shapes_give_the_same_labels() -> None:
    """Channels and slices are distinguished: each form of one picture gives the same labels."""
    colour = np.random.default_rng(0).random((30, 20, 3))
    model = made_of(Threshold(), channels=3)
    expected = model.predict(np.moveaxis(colour, -1, 0)[:, None])[0]
    np.testing.assert_array_equal(model.predict(colour), expected)
    grey = np.repeat(colour[..., :1], 3, axis=2)  # as a grey picture saved in colour
    np.testing.assert_array_equal(made_of(Threshold()).predict(grey), expected)
    np.testing.assert_array_equal(made_of(Threshold()).predict(grey[..., 0]), expected)
    np.testing.assert_array_equal(made_of(Threshold()).predict(grey[..., :1]), expected)


def test_a_path_is_an_image(tmp_path: Path, predictor: TorchPredictor, phantom_dataset: Path) -> None:
    from PIL import Image

    path = phantom_dataset / "imagesTr" / "phantom001_frame01_0000.nii.gz"
    for name in (path, str(path)):
        np.testing.assert_array_equal(predictor.predict(name), predictor.predict(read_image(path).array))
    picture = np.random.default_rng(0).integers(0, 255, (30, 20, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "photo.png")
    model = made_of(Threshold(), channels=3)
    np.testing.assert_array_equal(model.predict(tmp_path / "photo.png"), model.predict(picture))
    with pytest.raises(PclmixError, match=r"none\.png"):
        model.predict(tmp_path / "none.png")


@pytest.mark.parametrize(
    ("shape", "channels", "way_out"),
    [
        ((30, 20, 3), 1, "x.mean(-1)"),  # a colour picture for a grey model, or a volume of slivers
        ((3, 30, 20), 3, "x[:, None]"),  # channels or slices
        ((3, 20, 3), 3, "x[:, None]"),
        ((30, 20, 4), 3, "(H, W, C)"),
        ((30, 20), 3, "(H, W, 3)"),
        ((2, 4, 30, 20), 3, "2 as (C, Z, H, W)"),
        ((4, 30, 20, 3), 3, "np.moveaxis(x, -1, 0)"),
        ((8,), 1, "(H, W)"),
        ((1, 1, 1, 8, 8), 1, "(H, W)"),
        ((0, 8, 8), 1, "empty"),
    ],
)
def test_invalid_shapes_are_refused(shape: tuple[int, ...], channels: int, way_out: str) -> None:
    with pytest.raises(PclmixError, match=re.escape(way_out)):
        made_of(Threshold(), channels=channels).predict(np.random.default_rng(0).random(shape))


@pytest.mark.parametrize(("ending", "factor"), [("head.weight", 1e300), ("running_var", -1.0), ("head.bias", 1e300)])
def test_weights_that_give_nan_are_refused(tiny_run: Path, tmp_path: Path, ending: str, factor: float) -> None:
    """Each value is finite as stored: it overflows as float32, or a variance is below 0."""
    content = torch.load(tiny_run / "last.ckpt", weights_only=True)
    name = next(n for n in content["method"] if n.startswith("net.") and n.endswith(ending))
    content["method"][name] = torch.full_like(content["method"][name], factor, dtype=torch.float64)
    torch.save({**content, "average": None}, tmp_path / "changed.ckpt")
    with pytest.raises(PclmixError, match=r"changed\.ckpt.*(NaN|infinity)"):
        load(tmp_path / "changed.ckpt", device="cpu")


@pytest.mark.parametrize(
    "image",
    [np.full((1, 8, 8), np.nan), np.full((1, 8, 8), 1e35), np.zeros((1, 8, 8), dtype=complex), [["a"]]],
    ids=["nan", "large", "complex", "text"],
)
def test_values_refused(image: Any) -> None:
    with pytest.raises(PclmixError, match="NaN"):
        made_of(Threshold()).predict(image)


@pytest.mark.parametrize("spacing", [(1.0, 1.0), (1.0, 1.0, 0.0), (1.0, float("nan"), 1.0)])
def test_spacings_refused(spacing: tuple[float, ...]) -> None:
    with pytest.raises(PclmixError, match="spacing"):
        made_of(Threshold()).predict(np.zeros((1, 8, 8)), spacing)


def test_reprs_are_short(predictor: TorchPredictor, volume: np.ndarray) -> None:
    found = predictor.examine(volume)
    for shown in (repr(predictor), repr(found), repr(found.quality)):
        assert len(shown) < 200
        assert "\n" not in shown
    assert predictor.about.trained_on[0] not in repr(predictor.about)


@pytest.mark.parametrize("wrong", ["flips", True, None])
def test_unknown_choices_are_refused(tiny_run: Path, predictor: TorchPredictor, volume: np.ndarray, wrong: Any) -> None:
    for call in (predictor.predict, predictor.probabilities, predictor.examine):
        with pytest.raises(PclmixError, match=rf"tta={wrong!r}.*flip"):
            call(volume, tta=wrong)
    with pytest.raises(PclmixError, match=rf"precision={wrong!r}.*bf16"):
        pclmix.load(tiny_run, precision=wrong)


def test_models_refused(tiny_run: Path, tmp_path: Path) -> None:
    with pytest.raises(PclmixError, match=LAST):
        load(tmp_path, device="cpu")
    with pytest.raises(PclmixError, match=r"none\.ckpt"):
        load(tmp_path / "none.ckpt", device="cpu")
    with pytest.raises(PclmixError, match="--batch 0"):
        load(tiny_run, device="cpu", batch=0)
    (tmp_path / "text.ckpt").write_text("not a model")
    with pytest.raises(PclmixError, match=r"text\.ckpt"):
        load(tmp_path / "text.ckpt", device="cpu")
    content = torch.load(tiny_run / LAST, weights_only=True)
    torch.save({**content, "format": 99, "version": "9.0"}, tmp_path / "newer.ckpt")
    with pytest.raises(PclmixError, match=r"newer\.ckpt.*9\.0.*format 99"):
        load(tmp_path / "newer.ckpt", device="cpu")
    content["labels"]["names"].append("extra")
    torch.save(content, tmp_path / "classes.ckpt")
    with pytest.raises(PclmixError, match="5 classes"):
        load(tmp_path / "classes.ckpt", device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(PclmixError, match="CUDA"):
            load(tiny_run, device="cuda")


def test_malicious_files_are_refused(tmp_path: Path) -> None:
    """PyTorch's message explains how to disable the check."""
    torch.save({"weights": Path("x")}, tmp_path / "bad.ckpt")
    torch.save({"conv1.weight": Path("x")}, tmp_path / "bad.pth")
    messages = []
    with pytest.raises(PclmixError, match=r"bad\.ckpt") as refused:
        load(tmp_path / "bad.ckpt", device="cpu")
    messages.append(str(refused.value))
    with pytest.raises(PclmixError, match=r"bad\.pth") as refused:
        load_encoder_weights(ResNetEncoder("resnet18", 1), str(tmp_path / "bad.pth"), 1)
    messages.append(str(refused.value))
    assert not any("weights_only" in text or "torch.load" in text for text in messages)


def test_a_damaged_last_checkpoint_falls_back(tiny_run: Path, tmp_path: Path) -> None:
    whole = (tiny_run / LAST).read_bytes()
    (tmp_path / PREVIOUS).write_bytes(whole)
    middle = len(whole) // 2
    (tmp_path / LAST).write_bytes(whole[:middle] + b"damaged" + whole[middle + 7 :])
    assert load(tmp_path, device="cpu").about.labels.count == 4
    with pytest.raises(PclmixError, match="damaged"):
        load(tmp_path / LAST, device="cpu")


def test_the_package_itself_loads_models(tiny_run: Path, volume: np.ndarray) -> None:
    assert pclmix.load(tiny_run, device="cpu").predict(volume, (8, 1.5, 1.5)).shape == volume.shape
