"""File transfer to and from nodes, without Ray."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pclmix.cluster import carry
from pclmix.data.dataset import Dataset


def copy_of(dataset: Path, target: Path) -> Path:
    shutil.copytree(dataset, target)
    return target


def test_fingerprint_depends_on_names_sizes_and_json(phantom_dataset: Path, tmp_path: Path) -> None:
    copy = copy_of(phantom_dataset, tmp_path / "copy")
    key = carry.fingerprint(phantom_dataset)
    assert carry.fingerprint(copy) == key
    (copy / ".pclmix").mkdir()  # the workbench's own files are not part of it
    (copy / ".pclmix" / "x").write_text("x")
    assert carry.fingerprint(copy) == key
    text = (copy / "dataset.json").read_text()
    (copy / "dataset.json").write_text(text.replace('"LV"', '"LW"'))
    assert carry.fingerprint(copy) != key
    (copy / "dataset.json").write_text(text)
    (copy / "labelsTr" / "phantom001_frame01.nii.gz").unlink()
    assert carry.fingerprint(copy) != key
    assert not carry.sees(tmp_path / "nowhere", key)


def test_a_node_unpacks_once_for_all_its_tasks(
    phantom_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(carry, "PIECE", 2000)
    taken: list[int] = []

    def take() -> Iterator[carry.Files]:
        taken.append(1)
        yield from carry.pieces(carry.dataset_files(phantom_dataset), phantom_dataset)

    found: list[Path] = []
    tasks = [threading.Thread(target=lambda: found.append(carry.unpack("set", "key", take))) for _ in range(4)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    assert taken == [1]
    assert len(set(found)) == 1
    assert carry.fingerprint(found[0]) == carry.fingerprint(phantom_dataset)
    assert Dataset.open(found[0]).name == Dataset.open(phantom_dataset).name
    assert len(list(carry.pieces(carry.dataset_files(phantom_dataset), phantom_dataset))) > 1


def test_checkpoints_are_sent_after_their_metrics(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"1")
    (tmp_path / "metrics.jsonl").write_bytes(b"1\n")
    (tmp_path / "node.json").write_bytes(b"{}")
    (tmp_path / "evaluation.json").write_bytes(b"{}")
    (tmp_path / ".hidden").write_bytes(b"half a file")
    sent: list[list[str]] = []
    courier = carry.Courier(
        tmp_path, lambda files: sent.append(list(files)), last=("node.json", "evaluation.json"), held="evaluation.json"
    )
    courier.carry()
    assert sent.pop() == ["metrics.jsonl", "last.ckpt", "node.json"]
    courier.carry()
    assert not sent, "nothing changed"
    (tmp_path / "metrics.jsonl").write_bytes(b"1\n2\n")
    courier.carry(everything=True)
    assert sent.pop() == ["metrics.jsonl", "evaluation.json"]


def test_large_files_are_sent_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(carry.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(carry, "SMALL", 10)
    sent: list[list[str]] = []

    def send(files: carry.Files) -> None:
        sent.append(list(files))
        clock[0] += 2.0  # the transfer takes two seconds

    courier = carry.Courier(tmp_path, send)
    large, small = tmp_path / "last.ckpt", tmp_path / "metrics.jsonl"
    for step in range(3):
        large.write_bytes(bytes(20 + step))
        small.write_bytes(bytes(step + 1))
        courier.carry()
        clock[0] += 25.0
    # 2 s of transfer are followed by 20 times as long without one: the second round comes after 25 s, too early.
    assert sent == [["metrics.jsonl", "last.ckpt"], ["metrics.jsonl"], ["metrics.jsonl", "last.ckpt"]]


def test_depot_round_trip(tmp_path: Path) -> None:
    depot = carry.Depot(tmp_path / "data", tmp_path / "study")
    depot.store("a/fold1", {"metrics.jsonl": b"x", "predictions/c.nii.gz": b"y"})
    assert depot.fetch("a/fold1") == {"metrics.jsonl": b"x", "predictions/c.nii.gz": b"y"}
    assert depot.fetch("b/fold1") == {}
