"""Checkpoints: complete or refused, with the weights for prediction."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pclmix.errors import PclmixError
from pclmix.labels import Labels
from pclmix.training import checkpoint as module
from pclmix.training.checkpoint import (
    LAST,
    PREVIOUS,
    Checkpoint,
    build_net,
    find_checkpoint,
    load_checkpoint,
    load_newest,
    open_model,
    save_checkpoint,
    trained_state,
)

Make = Callable[..., Checkpoint]


def test_the_previous_checkpoint_is_kept(tmp_path: Path, make_checkpoint: Make) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, make_checkpoint(step))
    assert [load_checkpoint(tmp_path / name).step for name in (LAST, PREVIOUS)] == [3, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == [LAST, PREVIOUS]


def test_without_hard_links_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_checkpoint: Make
) -> None:
    def no_links(*_: Any) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(module.os, "link", no_links)
    test_the_previous_checkpoint_is_kept(tmp_path, make_checkpoint)


def test_a_kill_between_the_two_renames_leaves_no_link(tmp_path: Path, make_checkpoint: Make) -> None:
    save_checkpoint(tmp_path, make_checkpoint(1))
    (tmp_path / PREVIOUS).hardlink_to(tmp_path / LAST)  # killed before the new checkpoint was renamed
    save_checkpoint(tmp_path, make_checkpoint(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == [LAST, PREVIOUS]
    assert [load_checkpoint(tmp_path / name).step for name in (LAST, PREVIOUS)] == [2, 1]


@pytest.mark.parametrize("at", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_damaged_bytes_are_detected_or_harmless(tmp_path: Path, at: float, make_checkpoint: Make) -> None:
    """A flipped byte is refused, or it lies where nothing is read and the content is the same."""
    save_checkpoint(tmp_path, make_checkpoint(5))
    path = tmp_path / LAST
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 0xFF
    path.write_bytes(data)
    with suppress(PclmixError):
        assert torch.equal(load_checkpoint(path).method["w"], torch.full((1000,), 5.0))


@pytest.mark.parametrize("data", [b"", b"hello", b"PK\x03\x04" + bytes(100)])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(data)
    with pytest.raises(PclmixError, match=r"x\.ckpt"):
        load_checkpoint(path)


def test_other_content_and_versions_are_refused(tmp_path: Path, make_checkpoint: Make) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"state_dict": {}}, path)
    with pytest.raises(PclmixError, match=r"x\.ckpt.*'format'"):
        load_checkpoint(path)
    torch.save({**make_checkpoint(1).to_plain(), "format": 99, "version": "7.0"}, path)
    with pytest.raises(PclmixError, match=r"x\.ckpt.*7\.0.*format 99"):
        load_checkpoint(path)
    with pytest.raises(PclmixError, match=r"none\.ckpt"):
        load_checkpoint(tmp_path / "none.ckpt")


def test_newest_readable_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture, make_checkpoint: Make) -> None:
    assert load_newest(tmp_path) is None
    assert load_newest(tmp_path / "nowhere") is None
    for step in (1, 2):
        save_checkpoint(tmp_path, make_checkpoint(step))
    newest = load_newest(tmp_path)
    assert newest is not None
    assert newest.step == 2
    (tmp_path / LAST).write_bytes(b"gone")
    with caplog.at_level(logging.WARNING):
        older = open_model(tmp_path)
    assert older.step == 1
    assert str(tmp_path / LAST) in caplog.text
    (tmp_path / LAST).unlink()
    assert find_checkpoint(tmp_path) == tmp_path / PREVIOUS
    (tmp_path / PREVIOUS).write_bytes(b"gone")
    with pytest.raises(PclmixError, match=re.escape(str(tmp_path / PREVIOUS))):
        load_newest(tmp_path)
    (tmp_path / PREVIOUS).unlink()
    with pytest.raises(PclmixError, match=re.escape(str(tmp_path))):
        find_checkpoint(tmp_path)


def test_prediction_takes_the_average(unbroken: Path) -> None:
    checkpoint = load_checkpoint(unbroken / LAST)
    average = checkpoint.average
    assert average is not None
    state = trained_state(checkpoint)
    scale = 1 / (1 - 0.9**average.steps)
    assert average.steps == 12
    for name, total in average.sum.items():
        torch.testing.assert_close(state[name], total * scale)
        assert checkpoint.method[name].shape == total.shape
    net = build_net(checkpoint)
    first = next(name for name in average.sum if name.startswith("net."))
    torch.testing.assert_close(net.state_dict()[first.removeprefix("net.")], state[first])
    assert not net.training


def test_weights_of_another_class_count_are_refused(unbroken: Path) -> None:
    checkpoint = load_checkpoint(unbroken / LAST).model_copy(update={"labels": Labels(("background", "a"), 2)})
    with pytest.raises(PclmixError, match="2 classes"):
        build_net(checkpoint)


def test_whole_numbers_are_no_weights(unbroken: Path) -> None:
    """They would be converted to floats: the network would run, and predict nonsense."""
    checkpoint = load_checkpoint(unbroken / LAST)
    whole = {name: tensor.to(torch.int8) for name, tensor in checkpoint.method.items()}
    with pytest.raises(PclmixError, match="is of type int8"):
        build_net(checkpoint.model_copy(update={"method": whole, "average": None}))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("step", None, "step"),
        ("step", True, "step"),
        ("step", "3", "step"),
        ("step", -1, "step"),
        ("seconds", float("nan"), "seconds"),
        ("version", 1, "version"),
        ("channels", [], "channels"),
        ("channels", "MRI", "channels"),
        ("labels", {"names": ["background"], "ignore": 4}, "labels"),
        ("labels", {"names": [0, 1], "ignore": 4}, "labels.names.0"),
        ("spacing", {"median": [1.0, 1.0, float("inf")], "min": [1, 1, 1], "max": [1, 1, 1]}, "spacing.median.2"),
        ("run", {"dataset": "d", "fold": 1}, "run.cases"),
        ("config", {}, "config"),
        ("config", {"engine": {"iterations": True}}, "config.engine.iterations"),
        ("config", {"optim": {"lr": float("nan")}}, "config.optim.lr"),
        ("config", {"offset": {}}, "config.offset"),
        ("method", {"w": [1.0]}, "method.w"),
        ("method", {"w": torch.tensor([1.0, torch.nan])}, "method.w"),
        ("average", {"steps": 1, "sum": {"w": torch.tensor([torch.inf])}}, "average.sum.w"),
        ("method", {"w": torch.zeros(3, device="meta")}, "method.w"),
        ("method", {"w": torch.eye(3).to_sparse()}, "method.w"),
        ("method", {"w": torch.zeros(3, dtype=torch.complex64)}, "method.w"),
        ("average", {"steps": 1.5, "sum": {}}, "average.steps"),
        ("average", {"steps": 10**400, "sum": {}}, "average.steps"),
        ("random", [{"own": 3}], "random.0.own"),
        ("more", 1, "more"),
    ],
)
def test_wrong_content_is_refused_by_file_and_key(
    tmp_path: Path, make_checkpoint: Make, key: str, value: Any, named: str
) -> None:
    path = tmp_path / "wrong.ckpt"
    torch.save({**make_checkpoint(1).to_plain(), key: value}, path)
    with pytest.raises(PclmixError, match=rf"{re.escape(str(path))}: key '{re.escape(named)}'"):
        load_checkpoint(path)


@pytest.mark.parametrize("key", ["version", "config", "labels", "channels", "spacing", "run", "step", "method"])
def test_a_missing_key_is_named(tmp_path: Path, make_checkpoint: Make, key: str) -> None:
    content = make_checkpoint(1).to_plain()
    del content[key]
    torch.save(content, tmp_path / "short.ckpt")
    with pytest.raises(PclmixError, match=rf"short\.ckpt.*'{key}'"):
        load_checkpoint(tmp_path / "short.ckpt")


def test_a_checkpoint_survives_saving(unbroken: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(unbroken / LAST)
    save_checkpoint(tmp_path, checkpoint)
    one, other = checkpoint.to_plain(), load_checkpoint(tmp_path / LAST).to_plain()
    assert one.keys() == other.keys()
    assert all(torch.equal(one["method"][name], other["method"][name]) for name in one["method"])
    for key in ("config", "labels", "channels", "spacing", "run", "step", "seconds", "version"):
        assert one[key] == other[key]
