"""Training without a recipe, for minutes, and on parts of slices; `pclmix plan`."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

from pclmix.config import load_config
from pclmix.data.dataset import Dataset
from pclmix.data.store import Settings, open_store
from pclmix.errors import PclmixError
from pclmix.inference import load
from pclmix.methods.base import build_method
from pclmix.training import log, scores, trainer
from pclmix.training.feed import Feed
from pclmix.training.log import CONFIG, PLAN, RUN
from pclmix.training.plan import minutes_of
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "cache"))


def test_plan_and_train_from_it(phantom_dataset: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "plan.yaml"
    assert run("plan", phantom_dataset, "--out", out, "--device", "cpu", "--fold", 1).code == 0
    printed = run("plan", phantom_dataset, "--device", "cpu", "--fold", 1)
    assert printed.code == 0
    assert out.read_text() in printed.out
    folder = tmp_path / "run"
    few = ("engine.seconds=null", "engine.iterations=2", "data.size=[32,32]")
    assert run_training(
        TrainRequest(phantom_dataset, folder, recipe=str(out), overrides=few, fold=1, device="cpu", method="pce")
    )
    assert yaml.safe_load((folder / CONFIG).read_text())["recipe"] == "plan"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--out", "plan.txt"), "plan.txt"),
        (("--minutes", "-1"), "--minutes"),
        (("--fold", "99"), "fold 99"),
        (("--device", "tpu"), "tpu"),
    ],
)
def test_plan_refuses(arguments: tuple[str, ...], named: str, phantom_dataset: Path, run: Run) -> None:
    said = run("plan", phantom_dataset, *arguments)
    assert said.code == 2
    assert named in said.err


def test_a_plan_does_not_overwrite(phantom_dataset: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "plan.yaml"
    out.write_text("mine: 1")
    assert run("plan", phantom_dataset, "--out", out).code == 2
    assert out.read_text() == "mine: 1"


def test_train_without_a_recipe_plans(phantom_dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    request = TrainRequest(
        phantom_dataset, folder, overrides=("engine.iterations=2",), fold=1, device="cpu", method="pce"
    )
    said = Console(file=io.StringIO(), width=200)
    assert run_training(request, said)
    assert said.file.getvalue().count("drawn pixels") == 1
    config = yaml.safe_load((folder / CONFIG).read_text())
    assert config["recipe"] == "plan"
    assert config["engine"]["seconds"] is None
    assert config["engine"]["iterations"] == 2
    plan = load_config(str(folder / PLAN), "pce")
    assert list(plan.data.size) == config["data"]["size"]


def test_misspelt_settings_are_refused_before_the_data_is_read(tmp_path: Path, phantom_dataset: Path) -> None:
    with pytest.raises(PclmixError, match="lrr"):
        run_training(TrainRequest(phantom_dataset, tmp_path / "run", overrides=("optim.lrr=1",), device="cpu"))
    assert not (tmp_path / "run").exists()


def test_minutes_are_kept(phantom_dataset: Path, tmp_path: Path) -> None:
    """From the request to the finished run, within a tenth and half a minute; the schedule reaches its end."""
    minutes, started = 0.2, time.time()
    folder = tmp_path / "run"
    request = TrainRequest(
        phantom_dataset, folder, recipe="tiny", fold=1, device="cpu", minutes=minutes, started=started, method="pce"
    )
    assert run_training(request)
    assert abs(time.time() - started - 60 * minutes) <= 6 * minutes + 30
    engine = yaml.safe_load((folder / CONFIG).read_text())["engine"]
    assert 0 < engine["seconds"] < 60 * minutes
    assert "finished" in (folder / RUN).read_text()
    with pytest.raises(PclmixError, match="minutes"):
        run_training(TrainRequest(phantom_dataset, folder, resume=True, minutes=1.0))


@pytest.mark.parametrize("steps", [3, 10_000_000])
def test_a_long_training_prints_its_duration(
    phantom_dataset: Path, tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Console(file=io.StringIO(), width=200)
    overrides = (f"engine.iterations={steps}", "engine.log_every=1")
    request = TrainRequest(
        phantom_dataset, tmp_path / "run", recipe="tiny", overrides=overrides, device="cpu", method="pce"
    )
    monkeypatch.setattr(log.MetricLog, "write", lambda self, step, *_, **__: step < 3 or os.kill(os.getpid(), 2))
    assert run_training(request, said) is (steps == 3)
    assert ("--minutes" in said.file.getvalue()) is (steps > 3)


@pytest.mark.parametrize("minutes", [0.0, -2.0, float("nan")])
def test_minutes_are_above_0(minutes: float, tmp_path: Path) -> None:
    with pytest.raises(PclmixError, match="minutes"):
        TrainRequest(tmp_path, tmp_path / "run", minutes=minutes)


@pytest.mark.parametrize("key", ["engine.iterations", "engine.seconds"])
def test_minutes_beside_another_length_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(PclmixError, match=rf"--minutes 1 and {key}"):
        TrainRequest(tmp_path, tmp_path / "run", minutes=1, overrides=(f"{key}=5",))


def test_seconds_are_planned_for() -> None:
    assert minutes_of((), None) is None
    assert minutes_of(("engine.seconds=54",), None) == pytest.approx(1.0)
    assert minutes_of(("engine.seconds=54",), 7.0) == 7.0
    assert minutes_of(("engine.seconds=soon",), None) is None


def test_training_and_prediction_by_patches(phantom_dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    patches = ("engine.iterations=2", "data.size=[96,96]", "data.patch=[32,64]")
    assert run_training(TrainRequest(phantom_dataset, folder, recipe="tiny", overrides=patches, fold=1, device="cpu"))
    predictor = load(folder, device="cpu")
    assert predictor.about.patch == (32, 64)
    dataset = Dataset.open(phantom_dataset)
    image = dataset.read_image(dataset.cases[0]).array
    labels = predictor.predict(image)
    assert labels.shape == image.shape[1:]
    np.testing.assert_array_equal(labels, predictor.examine(image).labels)


def test_methods_with_slice_state_refuse_patches(phantom_dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(PclmixError, match=r"data\.patch"):
        run_training(
            TrainRequest(
                phantom_dataset, tmp_path / "run", recipe="tiny", method="s2l", overrides=("data.patch=[32,32]",)
            )
        )


def test_feed_crops_match_the_store(phantom_dataset: Path) -> None:
    dataset = Dataset.open(phantom_dataset)
    store = open_store(dataset, dataset.cases[:2], Settings((96, 96)))
    feeds = [Feed(store, 4, 0, torch.device("cpu"), patch=(32, 32)) for _ in range(2)]
    for step in (5, 0):
        for feed in feeds:
            feed.fill(step)
        assert torch.equal(feeds[0].image, feeds[1].image)
        assert feeds[0].image.shape == (4, 1, 32, 32)
        for row, index in enumerate(feeds[0].index.tolist()):
            whole = torch.from_numpy(store.images[index].astype(np.float32))
            parts = whole.unfold(1, 32, 1).unfold(2, 32, 1)
            assert (parts == feeds[0].image[row][:, None, None]).all(-1).all(-1).any()


def test_final_predictions_are_limited_on_a_cpu(phantom_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Dataset.open(phantom_dataset)
    store = open_store(dataset, dataset.cases, Settings((32, 32)))
    drawn = [n for n, labels in enumerate(store.labels) if (labels[0] >= 0).any()]
    net = torch.nn.Conv2d(1, 4, 1)
    whole = scores.agreement(net, store, torch.device("cpu"), 4)
    assert whole.sum() == sum(int((labels[0] >= 0).sum()) for labels in store.labels)
    monkeypatch.setattr(scores, "SLICES", 3)
    part = scores.agreement(net, store, torch.device("cpu"), 4)
    seen = [drawn[0], drawn[round((len(drawn) - 1) / 2)], drawn[-1]]
    assert part.sum() == sum(int((store.labels[n][0] >= 0).sum()) for n in seen)


def test_predictions_at_the_end_leave_time_for_training(
    phantom_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, cpu = Dataset.open(phantom_dataset), torch.device("cpu")
    store = open_store(dataset, dataset.cases, Settings((32, 32)))
    drawn = sum(bool((labels[0] >= 0).any()) for labels in store.labels)
    method = build_method(load_config("tiny", "pce"), 1, 4, len(store))
    assert scores.slices_within(1e6, method, store, cpu, None)[0] == drawn
    assert scores.slices_within(0.0, method, store, cpu, (32, 32))[0] == 6 < drawn
    assert method.training
    part = scores.agreement(method.net, store, cpu, 4, most=3)
    assert part.sum() < scores.agreement(method.net, store, cpu, 4).sum()
    given: list[Any] = []
    monkeypatch.setattr(trainer, "slices_within", lambda *_: (7, 0.0))
    monkeypatch.setattr(trainer, "write_results", lambda *words: given.append(words[-1]))
    options: dict[str, Any] = {"recipe": "tiny", "device": "cpu", "method": "pce", "minutes": 0.01}
    console = Console(file=io.StringIO(), width=300)
    assert run_training(TrainRequest(phantom_dataset, tmp_path / "run", **options), console)
    assert given == [7]
    assert "Give more --minutes" in console.file.getvalue()  # type: ignore[attr-defined]
