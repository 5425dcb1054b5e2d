"""A checkpoint as a predictor: the trained CNN branch, nothing of the transformer, labels at the image's own size."""

from __future__ import annotations

import json
import logging
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
from pclmix.config import Config
from pclmix.data.components import largest_component
from pclmix.data.store import Settings, intensity_range, prepare_image
from pclmix.data.volume import read_image
from pclmix.engine.checkpoint import LAST, PREVIOUS, build_net, load_checkpoint, trained_state
from pclmix.errors import PclmixError
from pclmix.labels import Labels
from pclmix.methods.base import build_method
from pclmix.nets.dual import forward_dual
from pclmix.predict import About, load
from pclmix.predict.model import TorchPredictor, about_model
from pclmix.predict.onnx import describe
from pclmix.resize import resize_linear


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
    content = load_checkpoint(lively_model)
    config = Config.model_validate(content["config"])
    method = build_method(config, 1, 4)
    method.load_state_dict(trained_state(content))
    method.eval()
    slices = torch.from_numpy(prepare_image(volume[None], Settings(config.data.size)).copy())
    with torch.no_grad():
        full = forward_dual(method.net, method.aux, method.head, slices, len(slices)).logits_c.numpy()
    expected = resize_linear(full, (70, 50))
    np.testing.assert_allclose(predictor.logits(volume), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    assert (predictor.predict(volume) == expected.argmax(1)).mean() > 0.999


def test_flips_that_training_never_showed_are_warned_of_once(
    lively_model: Path, caplog: pytest.LogCaptureFixture, volume: np.ndarray
) -> None:
    content = load_checkpoint(lively_model)
    assert about_model(lively_model, content).turned
    content["config"]["augment"]["quarter_turns"] = 0.0
    about = about_model(lively_model, content)
    assert not about.turned
    assert json.loads(describe(about, "1", "fp32")["pclmix.turned"]) is False
    predictor = TorchPredictor(about, build_net(content), torch.device("cpu"), batch=2)
    with caplog.at_level(logging.WARNING):
        predictor.predict(volume)
        assert not caplog.text
        predictor.predict(volume, tta="flip")
        predictor.probabilities(volume, tta="flip")
    assert caplog.text.count("augment.quarter_turns=0") == 1


def test_no_transformer_is_imported_or_built(tiny_run: Path) -> None:
    code = (
        "import sys; from pclmix.predict import load; p = load(sys.argv[1], device='cpu');"
        "bad = [m for m in sys.modules if m.startswith('pclmix.') and ('swin' in m or 'dual' in m or 'methods' in m)];"
        "assert not bad, bad; assert not [n for n, _ in p.net.named_modules() if 'swin' in n or 'aux' in n]"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_run)], check=True)


def test_a_predictor_knows_its_task(tiny_run: Path, predictor: TorchPredictor) -> None:
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
    slices = torch.from_numpy(prepare_image(volume[None], predictor.about.settings).copy())
    total = torch.zeros(())
    with torch.no_grad():
        for axes in ([], [2], [3], [2, 3]):
            turned = torch.flip(slices, axes) if axes else slices
            p = predictor.net(turned).softmax(1)
            total = total + (torch.flip(p, axes) if axes else p) / 4
    expected = resize_linear(total.numpy(), (70, 50))
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
    whole = prepare_image(image, Settings((8, 8), "volume"))
    limits = intensity_range(image, "volume")
    np.testing.assert_array_equal(prepare_image(image[:, 1:3], Settings((8, 8), "volume"), limits), whole[1:3])


def test_native_scores_are_held_a_few_slices_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    image = np.random.default_rng(0).random((5, 30, 40))
    expected = made_of(Threshold(), 5).predict(image)
    monkeypatch.setattr("pclmix.predict.model.SCORES_AT_ONCE", 3 * 30 * 40 * 2)
    seen: list[int] = []
    predictor = made_of(Threshold(), 5)
    resize = predictor._resize
    monkeypatch.setattr(predictor, "_resize", lambda s, size: (seen.append(len(s)), resize(s, size))[1])
    np.testing.assert_array_equal(predictor.predict(image), expected)
    assert seen == [2, 2, 1]


def test_nothing_waits_for_the_device(predictor: TorchPredictor, no_sync: Callable[[], object]) -> None:
    slices = torch.rand(3, 1, 64, 64)
    predictor.compute(slices, (70, 50))
    with no_sync():  # type: ignore[attr-defined]
        predictor.compute(slices, (70, 50), "flip")


@pytest.mark.parametrize("shape", [(70, 50), (2, 70, 50), (1, 2, 70, 50)])
def test_shapes_taken(predictor: TorchPredictor, shape: tuple[int, ...]) -> None:
    image = np.random.default_rng(0).random(shape)
    assert predictor.predict(image).shape == (1 if len(shape) == 2 else 2, 70, 50)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.zeros((2, 3, 8, 8)), "2 channels, the model takes 1"),
        (np.zeros((0, 8, 8)), "empty"),
        (np.zeros(8), "shape"),
        (np.full((1, 8, 8), np.nan), "NaN"),
        (np.zeros((1, 8, 8), dtype=complex), "non-numeric"),
    ],
)
def test_images_refused(predictor: TorchPredictor, image: np.ndarray, words: str) -> None:
    with pytest.raises(PclmixError, match=words):
        predictor.predict(image)
    with pytest.raises(PclmixError, match="spacing"):
        predictor.predict(np.zeros((1, 8, 8)), (1.0, 1.0))


@pytest.mark.parametrize("wrong", ["flips", True, None])
def test_words_that_are_not_known_are_refused(
    tiny_run: Path, predictor: TorchPredictor, volume: np.ndarray, wrong: Any
) -> None:
    for call in (predictor.predict, predictor.probabilities, predictor.probability_batches, predictor.examine):
        with pytest.raises(PclmixError, match=rf"tta={wrong!r}: choose none or flip"):
            call(volume, tta=wrong)
    with pytest.raises(PclmixError, match=rf"precision={wrong!r}: choose auto, 32 or bf16"):
        pclmix.load(tiny_run, precision=wrong)


def test_models_refused(tiny_run: Path, tmp_path: Path) -> None:
    with pytest.raises(PclmixError, match="holds no checkpoint"):
        load(tmp_path, device="cpu")
    with pytest.raises(PclmixError, match="does not exist"):
        load(tmp_path / "none.ckpt", device="cpu")
    with pytest.raises(PclmixError, match="at least one slice"):
        load(tiny_run, device="cpu", batch=0)
    (tmp_path / "text.ckpt").write_text("not a model")
    with pytest.raises(PclmixError, match="not a readable checkpoint"):
        load(tmp_path / "text.ckpt", device="cpu")
    content = load_checkpoint(tiny_run / LAST)
    torch.save({**content, "format": 99, "version": "9.0"}, tmp_path / "newer.ckpt")
    with pytest.raises(PclmixError, match=r"pclmix 9\.0 in checkpoint format 99"):
        load(tmp_path / "newer.ckpt", device="cpu")
    content["labels"]["names"].append("extra")
    torch.save(content, tmp_path / "classes.ckpt")
    with pytest.raises(PclmixError, match="5 classes"):
        load(tmp_path / "classes.ckpt", device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(PclmixError, match="no CUDA device"):
            load(tiny_run, device="cuda")


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
