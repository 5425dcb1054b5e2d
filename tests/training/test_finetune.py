"""Training from another run's weights: classes by name, everything else by name and shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pclmix.config import load_config
from pclmix.errors import PclmixError
from pclmix.labels import Labels
from pclmix.methods.base import build_method
from pclmix.training.checkpoint import load_newest, open_model, trained_state
from pclmix.training.finetune import Start, load_start, open_start
from pclmix.training.plan import make_plan
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training

HEAD = "net.decoder.head.weight"


def test_rows_follow_the_names_of_classes(tiny_run: Path) -> None:
    start = open_start(tiny_run, ("x",))
    given = trained_state(start.checkpoint)
    assert start.checkpoint.labels.names == ("background", "RV", "Myo", "LV")
    config, labels = load_config("tiny"), Labels(("back", "LV", "tumour", "RV", "aorta"), None)
    torch.manual_seed(1)
    method = build_method(config, 1, labels.count, 3)
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    load_start(method, config, start, labels)
    after = method.state_dict()
    for name in (HEAD, "net.decoder.head.bias"):
        for here, there in ((0, 0), (1, 3), (3, 1)):
            assert torch.equal(after[name][here], given[name][there])
        for new in (2, 4):
            assert torch.equal(after[name][new], before[name][new])
    body = [name for name in after if name.startswith("net.") and "head" not in name]
    assert body
    assert all(torch.equal(after[name], given[name]) for name in body)
    queue = [name for name in after if name.startswith("queue.")]
    assert queue
    assert all(torch.equal(after[name], before[name]) for name in queue)


def test_another_method_takes_the_network_alone(tiny_run: Path) -> None:
    start = open_start(tiny_run, ("x",))
    config = load_config("tiny", "pce")
    method = build_method(config, 1, 4)
    load_start(method, config, start, start.checkpoint.labels)
    given = trained_state(start.checkpoint)
    assert all(torch.equal(tensor, given[name]) for name, tensor in method.state_dict().items())


def test_other_channels_are_refused(tiny_run: Path) -> None:
    with pytest.raises(PclmixError, match="--from"):
        open_start(tiny_run, ("T1", "T2"))


def test_a_wrong_run_is_refused_before_the_data_is_surveyed(
    phantom_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def survey(*_: object, **__: object) -> None:
        raise AssertionError("surveyed")

    monkeypatch.setattr("pclmix.training.plan.survey", survey)
    with pytest.raises(PclmixError, match="nosuch does not exist"):
        make_plan(TrainRequest(phantom_dataset, tmp_path / "run", start_from=tmp_path / "nosuch", device="cpu"))


def test_the_network_is_that_of_the_run(tiny_run: Path, phantom_dataset: Path, tmp_path: Path) -> None:
    request = TrainRequest(phantom_dataset, tmp_path / "run", recipe="fast", start_from=tiny_run)
    plan = make_plan(request)
    assert (plan.config.net, plan.config.encoder.weights) == ("resnet10", "none")
    assert plan.start == Start(tiny_run, plan.start.checkpoint) if plan.start else False


def test_train_from_a_run(
    tiny_run: Path, phantom_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    still = ("engine.iterations=1", "optim.lr=1e-12", "optim.lr_end=0", "optim.weight_decay=0", "engine.ema=0")
    request = TrainRequest(
        phantom_dataset, folder, recipe="tiny", method="pce", overrides=still, device="cpu", start_from=tiny_run
    )
    assert run_training(request)
    trained, given = load_newest(folder), trained_state(open_model(tiny_run))
    assert trained is not None
    torch.testing.assert_close(trained.method[HEAD], given[HEAD], rtol=0, atol=1e-8)
    with pytest.raises(PclmixError, match="nowhere"):
        run_training(TrainRequest(phantom_dataset, tmp_path / "b", recipe="tiny", start_from=tmp_path / "nowhere"))
