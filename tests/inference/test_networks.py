"""A method that trains several networks: each predicts alone, and all as an ensemble. Snapshots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pclmix.errors import PclmixError
from pclmix.inference import load
from pclmix.inference.torch import load as load_model
from pclmix.io.volume import read_image
from pclmix.nets.segmenter import Ensemble
from pclmix.training.checkpoint import LAST, SNAPSHOTS, load_checkpoint, save_snapshot
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training


@pytest.fixture(scope="module")
def trimix_run(phantom_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trimix") / "run"
    overrides = ["engine.iterations=4", "engine.keep_every=2", "engine.ema=0.5", "optim.lr=0.05"]
    request = TrainRequest(
        phantom_dataset, run, method="trimix", recipe="tiny", overrides=overrides, fold=1, device="cpu"
    )
    assert run_training(request)
    return run


@pytest.fixture(scope="module")
def volume(phantom_dataset: Path) -> np.ndarray:
    return read_image(phantom_dataset / "imagesTr" / "phantom001_frame01_0000.nii.gz").array[0, 2:5]


def test_an_ensemble_is_the_mean_of_the_probabilities(trimix_run: Path, volume: np.ndarray) -> None:
    alone = [load(trimix_run, device="cpu", net=n).probabilities(volume) for n in ("net", "net2", "net3")]
    assert np.abs(alone[0] - alone[1]).max() > 1e-3
    assert np.abs(alone[1] - alone[2]).max() > 1e-3
    size = load_checkpoint(trimix_run / LAST).config.data.size
    square = np.zeros((1, *size), np.float32)  # at the network's own size nothing is resized after the softmax
    square[0, 3:20, 5:30] = 1.0
    alone = [load(trimix_run, device="cpu", net=n).probabilities(square) for n in ("net", "net2", "net3")]
    together = load(trimix_run, device="cpu", net="ensemble").probabilities(square)
    np.testing.assert_allclose(together, np.mean(alone, axis=0), atol=1e-5)


def test_ensemble_by_hand() -> None:
    def constant(p: float) -> torch.nn.Module:
        net = torch.nn.Conv2d(1, 2, 1)
        torch.nn.init.zeros_(net.weight)
        with torch.no_grad():
            net.bias.copy_(torch.tensor([p, 1 - p]).log())  # type: ignore[union-attr]
        return net

    logits = Ensemble([constant(0.9), constant(0.3)])(torch.zeros(1, 1, 1, 1))
    assert logits.softmax(1).flatten().tolist() == pytest.approx([0.6, 0.4])


def test_networks_have_different_identities(trimix_run: Path) -> None:
    known = {load(trimix_run, device="cpu", net=n).about.identity for n in ("net", "net2", "net3", "ensemble")}
    assert len(known) == 4
    assert load(trimix_run, device="cpu", last=True).about.identity not in known


def test_an_unknown_network_is_refused_with_the_known_ones(trimix_run: Path, tiny_run: Path) -> None:
    with pytest.raises(PclmixError, match=r"--net net9.*net3.*ensemble"):
        load(trimix_run, device="cpu", net="net9")
    with pytest.raises(PclmixError, match=r"--net net2.*pclmix"):
        load(tiny_run, device="cpu", net="net2")


def test_the_last_snapshot_predicts_as_the_run_does(trimix_run: Path, volume: np.ndarray) -> None:
    kept = sorted(path.name for path in (trimix_run / SNAPSHOTS).iterdir())
    assert kept == ["step-000002.ckpt", "step-000004.ckpt"]
    last = trimix_run / SNAPSHOTS / kept[-1]
    for net in ("net", "ensemble"):
        found, expected = (load(path, device="cpu", net=net).logits(volume) for path in (last, trimix_run))
        assert np.array_equal(found, expected)
    early = load_checkpoint(trimix_run / SNAPSHOTS / kept[0])
    assert early.step == 2
    assert early.seconds > 0
    assert early.is_snapshot
    assert early.random is None
    assert last.stat().st_size < (trimix_run / LAST).stat().st_size / 2


def test_a_snapshot_has_no_last_weights(trimix_run: Path) -> None:
    with pytest.raises(PclmixError, match=r"step-000002\.ckpt"):
        load(trimix_run / SNAPSHOTS / "step-000002.ckpt", device="cpu", last=True)


def test_a_snapshot_of_pclmix_has_the_uncertainty_of_its_cnn(
    tiny_run: Path, volume: np.ndarray, tmp_path: Path
) -> None:
    snapshot = save_snapshot(tmp_path, load_checkpoint(tiny_run / LAST), ("net",))
    predictor, whole = load_model(snapshot, device="cpu"), load_model(tiny_run, device="cpu")
    assert predictor.second is None
    assert whole.second is not None
    assert np.array_equal(predictor.predict(volume), whole.predict(volume))
    assert np.abs(predictor.examine(volume).entropy - whole.examine(volume).entropy).max() > 1e-4


def test_a_snapshot_on_a_full_disk(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("unexpected pos 64 vs 0")  # what torch's writer says then

    checkpoint = load_checkpoint(tiny_run / LAST)
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(PclmixError, match=r"step-\d+\.ckpt"):
        save_snapshot(tmp_path, checkpoint, ("net",))
    assert not list((tmp_path / SNAPSHOTS).iterdir())
