"""Entropy, certainty, expected Dice, the slices to draw on next, and the temperature behind the probabilities."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pclmix.cli import app
from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.inference.calibrate import Pixels, calibrate, figures, fit, held_out, probabilities
from pclmix.inference.files import predict_files
from pclmix.inference.torch import load
from pclmix.inference.uncertainty import entropy, examine, runner_up, write_quality, write_tables
from pclmix.io.files import read_json, write_json
from pclmix.losses import unlabelled as torch_uncertainty
from pclmix.methods.base import build_method
from pclmix.metrics import evaluate
from pclmix.nets.swin import forward_dual
from pclmix.training.checkpoint import TrainedOn, load_checkpoint, trained_state


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def test_entropy_is_equation_5() -> None:
    q = softmax(np.random.default_rng(0).normal(0, 3, (2, 4, 5, 6))).astype(np.float32)
    np.testing.assert_allclose(entropy(q), torch_uncertainty.entropy(torch.from_numpy(q)).numpy(), atol=1e-6)
    assert entropy(np.full((1, 2, 1, 1), 0.5)).item() == pytest.approx(np.log(2), abs=1e-5)


def test_the_expected_dice_by_hand() -> None:
    q = np.array([[[0.1, 0.4, 0.9], [0.0, 0.0, 0.0]], [[0.9, 0.6, 0.1], [0.0, 0.0, 0.0]]], float)  # (K=2, H=2, W=3)
    q[0, 1] = 1.0
    found = examine([(q.argmax(0)[None], q[None])])
    assert found.labels.tolist() == [[[1, 1, 0], [0, 0, 0]]]
    assert found.quality.dice == pytest.approx([2 * (0.9 + 0.6) / (2 + 1.6)])
    assert found.quality.expected_dice == found.quality.dice[0]
    u = [-p * np.log(p + 1e-6) - (1 - p) * np.log(1 - p + 1e-6) for p in (0.9, 0.6)]
    assert found.quality.certainty == pytest.approx(1 - np.mean(u) / np.log(2))
    assert found.quality.slice_errors == pytest.approx([0.1 + 0.4 + 0.1])
    sure = np.zeros((1, 3, 2, 2))
    sure[:, 0] = 1.0
    nothing = examine([(sure.argmax(1), sure)]).quality
    assert np.isnan(nothing.dice).all()
    assert nothing.certainty == nothing.expected_dice == 0.0


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 99))
def test_batches_do_not_change_the_figures(count: int, batch: int, seed: int) -> None:
    q = softmax(np.random.default_rng(seed).normal(0, 2, (count, 3, 4, 5)))
    whole = examine([(q.argmax(1), q)])
    parts = examine((q[i : i + batch].argmax(1), q[i : i + batch]) for i in range(0, count, batch))
    np.testing.assert_allclose(parts.quality.dice, whole.quality.dice)
    assert parts.quality.certainty == pytest.approx(whole.quality.certainty)
    np.testing.assert_array_equal(parts.second, whole.second)
    np.testing.assert_allclose(parts.entropy, whole.entropy)
    assert parts.quality.worst() == whole.quality.worst()


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 9), st.integers(0, 99))
def test_the_runner_up_equals_a_slow_loop(classes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q = softmax(rng.normal(0, 2, (2, classes, 3, 4))).astype(np.float32)
    label = rng.integers(0, classes, (2, 3, 4)).astype(np.uint8)  # of one decoder: not always the largest of q
    found = runner_up(label, q)
    for b, y, x in np.ndindex(label.shape):
        others = {k: q[b, k, y, x] for k in range(classes) if k != label[b, y, x]}
        assert found[b, y, x] == max(others, key=lambda k: others[k])


def test_expected_dice_is_right_if_the_probabilities_are() -> None:
    """References drawn from q have the expected Dice on average."""
    rng = np.random.default_rng(0)
    q = softmax(rng.normal(0, 2, (4, 2, 40, 40)))
    labels = q.argmax(1)
    expected = examine([(labels, q)]).quality.dice[0]
    dice = []
    for _ in range(30):
        reference = rng.random(labels.shape) < q[:, 1]
        dice.append(2 * (reference & (labels == 1)).sum() / (reference.sum() + (labels == 1).sum()))
    assert np.mean(dice) == pytest.approx(expected, abs=0.01)


def test_both_decoders_where_the_checkpoint_has_them(lively_model: Path, phantom_dataset: Path) -> None:
    predictor, alone = (load(lively_model, device="cpu") for _ in range(2))
    alone.second = None
    checkpoint = load_checkpoint(lively_model)
    method = build_method(checkpoint.config, 1, 4)
    method.load_state_dict(trained_state(checkpoint))
    method.eval()
    image = Dataset.open(phantom_dataset).read_image("phantom001_frame01").array[:, 2:4, :64, :64]
    slices = torch.from_numpy(predictor.about.preprocessing.images(image).copy())
    with torch.no_grad():
        out = forward_dual(method.net, method.aux, method.head, slices, 2)
        q = torch_uncertainty.mean_prediction(out.logits_c.softmax(1), out.logits_t.softmax(1), method.params.lambda_t)
    found = predictor.examine(image)
    np.testing.assert_allclose(found.entropy, torch_uncertainty.entropy(q).numpy(), atol=2e-3)
    others = np.where(np.arange(4)[:, None, None] == found.labels[:, None], -1, q.numpy())
    assert (found.second == others.argmax(1)).mean() > 0.999
    np.testing.assert_array_equal(found.labels, load(lively_model, device="cpu").predict(image))
    flipped = predictor.examine(image, tta="flip")
    assert (flipped.labels == load(lively_model, device="cpu").predict(image, tta="flip")).mean() > 0.999
    assert np.abs(alone.examine(image).entropy - found.entropy).max() > 1e-3
    np.testing.assert_array_equal(alone.examine(image).labels, found.labels)
    u = torch_uncertainty.entropy(torch.from_numpy(alone.probabilities(image))).numpy()
    np.testing.assert_allclose(alone.examine(image).entropy, u, atol=1e-5)


def test_scores_at_native_size_are_held_a_few_slices_at_a_time(
    lively_model: Path, phantom_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Dataset.open(phantom_dataset).read_image("phantom001_frame01").array[:, :5]
    size = (image.shape[2], image.shape[3])
    both, alone = (load(lively_model, device="cpu", batch=5) for _ in range(2))
    alone.second = None
    for predictor in (both, alone):
        expected = predictor.examine(image)
        with monkeypatch.context() as patch:
            patch.setattr("pclmix.inference.predictor.EXAMINED_AT_ONCE", 4 * size[0] * size[1] * 2)
            parts = list(predictor.uncertain_batches(predictor.batches(image), size))
            assert [len(labels) for labels, _ in parts] == [2, 2, 1]
            np.testing.assert_allclose(predictor.examine(image).entropy, expected.entropy, atol=1e-3)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_command_writes_maps_and_tables(lively_model: Path, phantom_dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["predict", str(lively_model), str(phantom_dataset), str(out), "--device", "cpu"]
    runner = CliRunner()
    assert runner.invoke(app, [*arguments, "--fold", "1"]).exit_code == 0
    done = runner.invoke(app, [*arguments, "--fold", "1", "--uncertainty"])
    assert "2 predicted" in done.output, "labels without a map are not enough"
    assert runner.invoke(app, [*arguments, "--fold", "2", "--uncertainty"]).exit_code == 0
    quality, slices = rows(out / "quality.csv"), rows(out / "slices.csv")
    assert len(quality) == 4, "the tables hold the folder, not the last call"
    assert list(quality[0]) == [
        "case", "certainty", "expected_dice", "expected_dice_RV", "expected_dice_Myo", "expected_dice_LV",
        "mean_entropy", "scribble_next"
    ]  # fmt: skip
    values = [float(row["certainty"]) for row in quality]
    assert values == sorted(values)
    assert all(0 <= v <= 1 for v in values)
    images = {path.name[: -len("_0000.nii.gz")]: nib.load(path) for path in (phantom_dataset / "imagesTr").iterdir()}
    shares = [float(row["expected_wrong_pixels"]) / np.prod(images[row["case"]].shape[:2]) for row in slices]
    np.testing.assert_array_less(np.diff(shares), 1e-4)  # the table is rounded
    case = quality[0]["case"]
    own = [row["slice"] for row in slices if row["case"] == case]
    assert quality[0]["scribble_next"].split() == own[:3]
    image = nib.load(phantom_dataset / "imagesTr" / f"{case}_0000.nii.gz")
    written = nib.load(out / "uncertainty" / f"{case}.nii.gz")
    np.testing.assert_array_equal(written.affine, image.affine)
    map_ = written.get_fdata()
    assert map_.shape == image.shape
    assert 0 <= map_.min() <= map_.max() <= np.log(4) + 1e-4
    assert len(evaluate(out, phantom_dataset, fold=1).cases) == 2, "maps and tables are not in the way of evaluation"


def test_slices_of_images_of_different_sizes_are_ranked_by_their_share_of_errors(tmp_path: Path) -> None:
    for case, scale in (("large", 3), ("small", 1)):
        q = np.full((2, 2, 10 * scale, 10 * scale), 0.5, np.float32)
        wrong = 40 if case == "small" else 90  # of 100 and of 900 pixels, in the second slice
        flat = q.reshape(2, 2, -1)
        flat[1, 0, wrong:], flat[1, 1, wrong:] = 1.0, 0.0
        flat[0, 0], flat[0, 1] = 1.0, 0.0
        write_quality(tmp_path, case, examine([(q.argmax(1).astype(np.uint8), q)]).quality)
    write_tables(tmp_path, ["object"])
    first, second = rows(tmp_path / "slices.csv")[:2]
    assert [(first["case"], first["slice"]), (second["case"], second["slice"])] == [("small", "1"), ("large", "1")]
    assert float(first["expected_wrong_pixels"]) < float(second["expected_wrong_pixels"])


def test_uncertainty_needs_a_folder(lively_model: Path, phantom_dataset: Path, tmp_path: Path) -> None:
    image = phantom_dataset / "imagesTr" / "phantom001_frame01_0000.nii.gz"
    with pytest.raises(PclmixError, match=r"OUT.*folder"):
        predict_files(load(lively_model, device="cpu"), image, tmp_path / "a.nii.gz", uncertainty=True)


def test_the_temperature_is_found() -> None:
    rng = np.random.default_rng(0)
    true = rng.normal(0, 2, (20000, 4))
    p = softmax(true)
    label = (p.cumsum(1) < rng.random((len(p), 1))).sum(1)
    pixels = Pixels((true * 2.5,), label, np.zeros(len(label), int))
    assert fit(pixels, 0.0) == pytest.approx(2.5, rel=0.05)
    before, after = (figures(probabilities(pixels, t, 0.0), label) for t in (1.0, 2.5))
    assert after["ece"] < 0.02 < before["ece"]
    assert after["nll"] < before["nll"]
    assert after["accuracy"] == before["accuracy"]
    twice = Pixels((true * 2.5, true * 2.5), label, pixels.case)
    assert fit(twice, 0.4) == pytest.approx(2.5, rel=0.05)


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_run, tmp_path / "run")
    return tmp_path / "run"


def test_a_calibrated_run(run: Path, phantom_dataset: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(phantom_dataset, other)
    text = (other / "dataset.json").read_text()
    (other / "dataset.json").write_text(text.replace('"phantom"', '"another"'))
    done = CliRunner().invoke(app, ["calibrate", str(run), str(other), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    report = read_json(run / "calibration.json")
    assert (run / "reliability.png").stat().st_size > 1000
    assert report["cnn"]["after"]["nll"] <= report["cnn"]["before"]["nll"] + 0.05
    image = Dataset.open(phantom_dataset).read_image("phantom001_frame01").array
    before, after = load(tmp_path / "run" / "last.ckpt", device="cpu"), load(run, device="cpu")
    assert before.about.temperature == after.about.temperature == report["temperature"]
    expected = softmax(after.logits(image) / report["temperature"])
    np.testing.assert_allclose(after.probabilities(image), expected, atol=1e-5)
    assert after.second is not None
    assert after.second.temperature == report["mean_temperature"]
    with pytest.raises(PclmixError, match="--overwrite"):
        calibrate(run, other, device="cpu")
    content = torch.load(run / "last.ckpt", weights_only=True)
    content["method"]["net.decoder.head.bias"] += 1
    content["average"] = None
    torch.save(content, run / "last.ckpt")
    assert load(run, device="cpu").about.temperature == 1.0, "trained on since: the temperature is of other weights"


@pytest.mark.parametrize("temperature", [float("nan"), 0, -1, "2", [1.0], True, 10**400])
def test_an_invalid_temperature_is_refused(run: Path, temperature: object) -> None:
    identity = load(run, device="cpu").about.identity
    write_json(run / "calibration.json", {"identity": identity, "temperature": temperature})
    with pytest.raises(PclmixError, match=r"calibration\.json.*temperature"):
        load(run, device="cpu")


def test_calibration_uses_held_out_cases_only(run: Path, phantom_dataset: Path, tmp_path: Path) -> None:
    dataset = Dataset.open(phantom_dataset)
    with pytest.raises(PclmixError, match=r"validation=0\.1"):
        calibrate(run, phantom_dataset, device="cpu")
    kept = held_out(dataset, TrainedOn(dataset="phantom", fold=1, cases=("phantom002_frame01",)))
    assert kept == ("phantom002_frame02", "phantom003_frame01", "phantom003_frame02"), "neither trained on nor tested"
    with pytest.raises(PclmixError, match=r"last\.ckpt"):
        calibrate(run / "last.ckpt", phantom_dataset)
