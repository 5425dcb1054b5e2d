"""Checkpoints are whole or refused, and the weights to predict with come out of them."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pclmix.engine import checkpoint as module
from pclmix.engine.checkpoint import (
    LAST,
    PREVIOUS,
    build_net,
    find_checkpoint,
    load_checkpoint,
    load_newest,
    open_model,
    save_checkpoint,
    trained_state,
)
from pclmix.errors import PclmixError


def content_of(step: int) -> dict[str, Any]:
    weights = torch.full((1000,), float(step))
    return {"version": "0", "config": {}, "labels": {}, "channels": [], "step": step, "method": {"w": weights}}


def test_the_one_before_is_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, content_of(step))
    assert [load_checkpoint(tmp_path / name)["step"] for name in (LAST, PREVIOUS)] == [3, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == [LAST, PREVIOUS]


def test_without_hard_links_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(module.os, "link", no_links)
    test_the_one_before_is_kept(tmp_path)


@pytest.mark.parametrize("at", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_any_damaged_byte_is_noticed_or_harmless(tmp_path: Path, at: float) -> None:
    """A flipped byte is refused, or it lies where nothing is read and the content is the same."""
    save_checkpoint(tmp_path, content_of(5))
    path = tmp_path / LAST
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 0xFF
    path.write_bytes(data)
    with suppress(PclmixError):
        assert torch.equal(load_checkpoint(path)["method"]["w"], torch.full((1000,), 5.0))


@pytest.mark.parametrize("data", [b"", b"hello", b"PK\x03\x04" + bytes(100)])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(data)
    with pytest.raises(PclmixError, match=r"x\.ckpt is not a readable checkpoint"):
        load_checkpoint(path)


def test_other_content_and_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"state_dict": {}}, path)
    with pytest.raises(PclmixError, match="is not a checkpoint of pclmix"):
        load_checkpoint(path)
    torch.save({**content_of(1), "format": 99, "version": "7.0"}, path)
    with pytest.raises(PclmixError, match=r"written by pclmix 7\.0 in checkpoint format 99"):
        load_checkpoint(path)
    with pytest.raises(PclmixError, match="does not exist"):
        load_checkpoint(tmp_path / "none.ckpt")


def test_the_newest_that_can_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_newest(tmp_path) is None
    assert load_newest(tmp_path / "nowhere") is None
    for step in (1, 2):
        save_checkpoint(tmp_path, content_of(step))
    newest = load_newest(tmp_path)
    assert newest is not None
    assert newest["step"] == 2
    (tmp_path / LAST).write_bytes(b"gone")
    with caplog.at_level(logging.WARNING):
        older = open_model(tmp_path)
    assert older["step"] == 1
    assert "trying the checkpoint before it" in caplog.text
    (tmp_path / LAST).unlink()
    assert find_checkpoint(tmp_path) == tmp_path / PREVIOUS
    (tmp_path / PREVIOUS).write_bytes(b"gone")
    with pytest.raises(PclmixError, match="no checkpoint of"):
        load_newest(tmp_path)
    (tmp_path / PREVIOUS).unlink()
    with pytest.raises(PclmixError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)


def test_prediction_takes_the_average(unbroken: Path) -> None:
    content = load_checkpoint(unbroken / LAST)
    average = content["average"]
    state = trained_state(content)
    scale = 1 / (1 - 0.9 ** average["steps"])
    assert average["steps"] == 12
    for name, total in average["sum"].items():
        torch.testing.assert_close(state[name], total * scale)
        assert content["method"][name].shape == total.shape
    net = build_net(content)
    first = next(name for name in average["sum"] if name.startswith("net."))
    torch.testing.assert_close(net.state_dict()[first.removeprefix("net.")], state[first])
    assert not net.training


def test_weights_of_another_class_count_are_refused(unbroken: Path) -> None:
    content = load_checkpoint(unbroken / LAST)
    content["labels"] = {"names": ["background", "a"], "ignore": 2}
    with pytest.raises(PclmixError, match=r"do not fit what it says of itself .*2 classes"):
        build_net(content)
