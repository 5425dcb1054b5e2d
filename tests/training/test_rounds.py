"""A second round on corrected labels: end to end, resumed in either round, without habits, refused settings."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pclmix
from pclmix.config import load_config, override_config, planned_steps
from pclmix.data.batch import mark_outside
from pclmix.data.dataset import Dataset
from pclmix.data.habits import override_habits
from pclmix.data.store import Settings, open_store
from pclmix.errors import PclmixError
from pclmix.labels import IGNORE
from pclmix.training import rounds
from pclmix.training.checkpoint import LAST, Round, build_net, load_checkpoint
from pclmix.training.log import read_metrics

Train = Callable[..., tuple[bool, str]]
TWO = ("engine.iterations=6", "rounds.count=2", "rounds.iterations=5", "engine.save_every=2", "rounds.augment.pinch=1")
DRAWN = random.SystemRandom()


@pytest.fixture(scope="module")
def two(phantom: Path, train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of PCLMix in two rounds, with snapshots."""
    run = tmp_path_factory.mktemp("two") / "run"
    assert train(phantom, run, *TWO, "engine.keep_every=6")[0]
    return run


def test_the_second_round_learns_straightened_predictions_of_the_first(phantom: Path, two: Path) -> None:
    checkpoint = load_checkpoint(two / LAST)
    assert (checkpoint.step, checkpoint.round.number, checkpoint.round.begins) == (11, 2, 6)
    assert {name.split(".")[0] for name in checkpoint.method} == {"net"}  # one network, no transformer
    assert (checkpoint.config.method, checkpoint.settings.method) == ("pclmix", "full")
    assert checkpoint.settings.augment.pinch == 1
    lines = read_metrics(two)
    assert [line["round"] for line in lines] == [1] * 6 + [2] * 5
    assert [line["step"] for line in lines] == list(range(1, 12))
    assert {"loss/ce", "loss/dice"} <= set(lines[-1])
    assert lines[6]["lr"] == pytest.approx(lines[0]["lr"], rel=0.1)  # the schedule starts again
    assert json.loads((two / "run.json").read_text())["step"] == 11
    # The labels are those of the averaged network of round 1.
    dataset, config = Dataset.open(phantom), checkpoint.config
    store = open_store(dataset, dataset.cases, Settings(config.data.size, config.data.intensity, config.data.aspect))
    first = load_checkpoint(two / "snapshots" / "step-000006.ckpt")
    assert first.round.number == 1
    habits = override_habits({}, config.habits, dataset.labels)
    cpu = torch.device("cpu")
    made = rounds.make_labels(build_net(first), store, habits, dataset.labels, cpu, False, config.rounds)
    kept = rounds.read_labels(two, checkpoint.round, store)
    assert np.array_equal(made, kept)
    strokes = store.labels[:, 0]
    assert np.array_equal(kept[strokes != IGNORE], strokes[strokes != IGNORE])
    plain = rounds.make_labels(build_net(first), store, {}, dataset.labels, cpu, False, config.rounds)
    assert not np.array_equal(plain, kept)


def test_predict_info_and_export_of_a_run_in_rounds(phantom: Path, two: Path, tmp_path: Path) -> None:
    from pclmix.export.bundle import model_card

    predictor = pclmix.load(two, device="cpu")
    case = Dataset.open(phantom).cases[0]
    volume = Dataset.open(phantom).read_image(case)
    labels = predictor.predict(volume.array, volume.geometry.spacing)
    assert labels.shape == volume.array.shape[1:]
    card = model_card(two)
    assert card["training"]["steps"] == 11
    assert "2" in str(card["training"]["rounds"])
    with pytest.raises(PclmixError, match="--net"):
        pclmix.load(two, device="cpu", net="net2")


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_killed_in_either_round_and_resumed(
    phantom: Path, two: Path, tmp_path: Path, spawn: Callable[..., Any], same_run: Callable[..., None], first: bool
) -> None:
    run, overrides = tmp_path / "run", (*TWO, "engine.keep_every=6")
    target, pause = DRAWN.randint(1, 5) if first else DRAWN.randint(6, 10), DRAWN.uniform(0, 0.3)
    child, _ = spawn(phantom, run, *overrides)
    limit = time.monotonic() + 300
    while len(read_metrics(run)) < target and child.is_alive():
        assert time.monotonic() < limit, "the process hangs"
        time.sleep(0.01)
    time.sleep(pause)
    child.kill()
    child.join()
    child, answer = spawn(phantom, run, *overrides, resume=True)
    child.join()
    assert json.loads(answer.read_text()) is True
    try:
        same_run(two, run)
    except AssertionError as error:
        raise AssertionError(f"killed {pause} s after step {target}") from error


def test_killed_between_the_rounds(
    phantom: Path, two: Path, tmp_path: Path, train: Train, same_run: Callable[..., None], monkeypatch: Any
) -> None:
    run = tmp_path / "run"

    def stop(*_: Any) -> None:
        raise PclmixError("no further")

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "write_labels", stop)
        with pytest.raises(PclmixError, match="no further"):
            train(phantom, run, *TWO, "engine.keep_every=6")
    assert load_checkpoint(run / LAST).round == Round()
    assert load_checkpoint(run / LAST).step == 6
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    assert train(phantom, run, recipe=None, resume=True)[0]
    same_run(two, run)
    assert train(phantom, run, recipe=None, resume=True)[0]


def test_killed_after_the_last_checkpoint_of_the_last_round(
    phantom: Path, two: Path, tmp_path: Path, train: Train, same_run: Callable[..., None]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(two, run)
    (run / "run.json").write_text('{"status": "running"}')
    assert train(phantom, run, recipe=None, resume=True)[0]
    same_run(two, run)


@pytest.mark.parametrize("harm", ["missing", "other"])
def test_lost_labels_are_refused(phantom: Path, two: Path, tmp_path: Path, train: Train, harm: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(two, run)
    (run / "run.json").write_text('{"status": "running"}')
    shutil.copy(run / "previous.ckpt", run / LAST)
    path = run / "round2.npz"
    if harm == "missing":
        path.unlink()
    else:
        with np.load(path) as content:
            labels = content["labels"]
        np.savez(path, labels=np.roll(labels, 1, axis=0))
    with pytest.raises(PclmixError, match=r"round2\.npz"):
        train(phantom, run, recipe=None, resume=True)


def test_rounds_without_habits_enforce_strokes_only(phantom: Path, tmp_path: Path, train: Train) -> None:
    root = tmp_path / "data"
    shutil.copytree(phantom, root)
    about = json.loads((root / "dataset.json").read_text())
    about.pop("habits")
    (root / "dataset.json").write_text(json.dumps(about))
    run = tmp_path / "run"
    assert train(root, run, *TWO, "engine.keep_every=6", method="pce")[0]
    dataset, checkpoint = Dataset.open(root), load_checkpoint(run / LAST)
    store = open_store(dataset, dataset.cases, Settings(checkpoint.config.data.size))
    net = build_net(load_checkpoint(run / "snapshots" / "step-000006.ckpt"))
    raw = list(rounds._predictions(net, store, torch.device("cpu"), torch.float32))
    strokes = store.labels[:, 0]
    found = rounds.read_labels(run, checkpoint.round, store)
    assert np.array_equal(found, np.where(strokes == IGNORE, np.stack(raw).argmax(1), strokes))


@pytest.mark.parametrize("method", ["full", "trimix", "s2l"])
def test_other_methods_in_rounds(phantom: Path, tmp_path: Path, train: Train, method: str) -> None:
    """Masks instead of strokes, several networks, and methods with per-slice state."""
    short = ("engine.iterations=2", "rounds.count=2", "rounds.iterations=2")
    assert train(phantom, tmp_path / "run", *short, method=method)[0]
    assert load_checkpoint(tmp_path / "run" / LAST).step == 4
    assert pclmix.load(tmp_path / "run", device="cpu").about.labels.count == 4


def test_a_time_budget_covers_all_rounds(phantom: Path, tmp_path: Path, train: Train) -> None:
    run = tmp_path / "run"
    assert train(phantom, run, "engine.seconds=3", "rounds.count=2", "rounds.iterations=1", "rounds.share=0.4")[0]
    checkpoint = load_checkpoint(run / LAST)
    assert checkpoint.round.number == 2
    assert 0 < checkpoint.round.begins < checkpoint.step
    assert 3 <= checkpoint.seconds < 60  # without a budget it would not end


def test_rounds_share_a_time_budget() -> None:
    config = load_config("tiny", None, ["engine.seconds=100", "rounds.count=3", "rounds.iterations=1"])
    ends = [rounds.end_of(config, Round(number=n, since=since)) for n, since in ((1, 0), (2, 62), (3, 82), (3, 97))]
    assert ends == pytest.approx([60, 80, 100, 107])  # a round that labels for 17 of its 20 seconds still trains for 10


def test_ranks_agree_on_values(phantom: Path, tmp_path: Path) -> None:
    """In both rounds the ranks hold the same weights after every step, and each had its own images."""
    run, worker = tmp_path / "run", Path(__file__).with_name("engine_worker.py")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(worker), "train", str(phantom)]
    done = subprocess.run(
        [sys.executable, *words, "--out", str(run), "--recipe", "tiny", "--device", "cpu", *TWO],
        env=os.environ | {"TRACE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    first, second = (
        [json.loads(line) for line in (tmp_path / f"{rank}.jsonl").read_text().splitlines()] for rank in (0, 1)
    )
    assert [line["step"] for line in first] == [*range(6), *range(5)]
    assert [line["weights"] for line in first] == [line["weights"] for line in second]
    assert all(one["index"] != two["index"] for one, two in zip(first, second, strict=True))
    checkpoint = load_checkpoint(run / LAST)
    assert (checkpoint.step, checkpoint.round.number) == (11, 2)
    assert checkpoint.random is not None
    assert len(checkpoint.random) == 2


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["rounds.count=2"], "rounds.iterations"),
        (["rounds.count=2", "rounds.iterations=0"], "rounds.iterations"),
        (["rounds.count=2", "rounds.iterations=many"], "rounds.iterations"),
        (["rounds.count=0"], "rounds.count"),
        (["rounds.count=6", "rounds.iterations=3"], "rounds.share"),
        (["rounds.count=2", "rounds.iterations=3", "rounds.augment.pinhc=1"], "rounds.augment.*pinhc"),
        (["rounds.count=2", "rounds.iterations=3", "rounds.augment.degrees=-1"], "rounds.augment.*degrees"),
    ],
)
def test_wrong_settings_are_refused(overrides: list[str], key: str) -> None:
    with pytest.raises(PclmixError, match=key):
        load_config("tiny", None, overrides)


def test_the_command_names_the_missing_key(phantom: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    from pclmix.cli import main

    words = ["pclmix", "train", str(phantom), "--out", str(tmp_path / "run"), "--recipe", "tiny", "rounds.count=2"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "rounds.iterations" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_steps_of_all_rounds() -> None:
    content = load_config("tiny", None, ["rounds.count=3", "rounds.iterations=7"]).model_dump(mode="json")
    assert planned_steps(content) == 30 + 2 * 7
    assert override_config(content, None, ["rounds.count=1"]).of_round(1).rounds.count == 1
    assert planned_steps({"engine": {"iterations": 5}}) == 5  # of a run before there were rounds


def test_only_slices_with_a_ring_have_a_known_outside(phantom: Path) -> None:
    """As `data.ring_share` in training steps: not where few strokes were drawn or a class is missing."""
    dataset = Dataset.open(phantom)
    store = open_store(dataset, dataset.cases[:2], Settings((64, 64)))
    strokes = np.array(store.labels)
    strokes[0] = IGNORE
    strokes[0, 0, 10, 10:14], strokes[0, 0, 20, 20] = 0, 1  # a correction: a structure outside the background's stroke
    annotated = np.array([[True] * 4, [True, False, True, True]])
    store = replace(store, labels=strokes, annotated=annotated)

    class Ones(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.ones_like(image[:, 0], dtype=torch.long), 4).movedim(-1, 1) * 9.0

    cpu, settings = torch.device("cpu"), load_config("tiny").rounds
    made = rounds.make_labels(Ones(), store, {"background": ("ring",)}, dataset.labels, cpu, False, settings)
    outside = mark_outside(torch.from_numpy(strokes), 0)[:, -1].numpy() == 0
    known = [bool(n) and store.case_of[i] == 0 for i, n in enumerate(outside.sum((1, 2)))]
    assert not known[0]
    assert known.count(True) > 3
    assert any(outside[i].any() for i in range(len(store)) if store.case_of[i] == 1)
    for i, labels in enumerate(made):
        free = strokes[i, 0] == IGNORE
        assert (labels[outside[i] & free] == (0 if known[i] else 1)).all()
        assert known[i] or (labels[free] == 1).all()
