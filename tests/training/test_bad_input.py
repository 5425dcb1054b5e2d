"""Invalid trainings are refused with one message, and existing files are kept."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

from pclmix.errors import PclmixError
from pclmix.training import trainer
from pclmix.training.checkpoint import LAST, PREVIOUS, Checkpoint, load_checkpoint, save_checkpoint

Train = Callable[..., tuple[bool, str]]
FOUR = ("engine.iterations=4", "engine.save_every=2")


@pytest.fixture
def refused(phantom: Path, tmp_path: Path, train: Train) -> Callable[..., str]:
    """The message of a refused `train`, which may not create a run folder."""

    def call(*overrides: str, dataset: Path = phantom, **options: Any) -> str:
        with pytest.raises(PclmixError) as caught:
            train(dataset, tmp_path / "run", *overrides, **options)
        assert not (tmp_path / "run").exists()
        return str(caught.value)

    return call


@pytest.mark.parametrize(
    ("overrides", "options", "words"),
    [
        (["engine.batch=1"], {}, ["engine.batch=1", "BatchNorm", "engine.batch=2"]),
        (["engine.batch=5"], {"devices": 2}, ["engine.batch=5", "2 devices"]),
        (["engine.batch=2"], {"devices": 2}, ["engine.batch=4"]),
        (["data.size=[60,64]"], {}, ["data.size=[60, 64]", "32", "64x64"]),
        ([], {"device": "gpu"}, ["--device gpu", "cpu", "cuda"]),
        ([], {"devices": 0}, ["devices=0"]),
        ([], {"method": "pclmx"}, ["'pclmx'", "'pclmix'"]),
        ([], {"recipe": "tny"}, ["'tny'", "'tiny'"]),
        ([], {"recipe": "none.yaml"}, ["none.yaml"]),
        (["net=resnet5"], {}, ["'resnet5'", "'resnet50'"]),
        (["optim.lrr=1"], {}, ["'optim.lrr'", "'lr'"]),
        (["params.queu=1"], {}, ["'queu'", "'queue'"]),
        (["optim.lr=-1"], {}, ["optim.lr=-1"]),
        (["seed=-1"], {}, ["seed=-1"]),
        (["optim.lr"], {}, ["'optim.lr'", "key=value"]),
        ([], {"fold": 9}, ["fold 9", "1 to 3"]),
        (["encoder.weights=nowhere.pth"], {}, ["nowhere.pth"]),
    ],
)
def test_refused(refused: Callable[..., str], overrides: list[str], options: dict[str, Any], words: list[str]) -> None:
    message = refused(*overrides, **options)
    for word in words:
        assert word in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_missing_gpu_is_refused(refused: Callable[..., str]) -> None:
    assert "--device cpu" in refused(device="cuda")


def test_unwritable_cache_is_refused(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "file" / "cache"))
    message = refused()
    assert str(tmp_path / "file" / "cache") in message
    assert "PCLMIX_CACHE" in message


def test_torchrun_and_devices_must_agree(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    message = refused(devices=3)
    assert all(part in message for part in ("--devices 3", "torchrun", "--nodes"))


def test_an_existing_run_is_refused(phantom: Path, tmp_path: Path, train: Train) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(PclmixError, match="exists already"):
        train(phantom, tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_class_without_strokes_is_refused(phantom: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    dataset = shutil.copytree(phantom, tmp_path / "data")
    for path in (dataset / "labelsTr").iterdir():
        file = nib.load(path)
        array = np.asarray(file.dataobj).copy()
        array[array == 2] = 4
        nib.save(nib.Nifti1Image(array, file.affine, file.header), path)
    message = refused(dataset=dataset)
    assert "Myo" in message
    assert str(dataset) in message


def test_an_invalid_dataset_is_refused_as_by_check(phantom: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    from pclmix.data.check import check
    from pclmix.data.dataset import Dataset

    dataset = shutil.copytree(phantom, tmp_path / "data")
    (dataset / "labelsTr" / "phantom002_frame01.nii.gz").write_bytes(b"no scribbles")
    message = refused(dataset=dataset)
    assert "phantom002_frame01" in message
    assert message == check(Dataset.open(dataset), references=False, habits=False).refusal()


def test_invalid_input_exits_with_code_2(
    phantom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pclmix.cli import main

    monkeypatch.setattr(sys, "argv", ["pclmix", "train", str(phantom), "--out", str(tmp_path), "optim.lrr=1"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "error:" in error
    assert "optim.lrr" in error
    assert "Traceback" not in error


@pytest.mark.usefixtures("odd_methods")
def test_nan_stops_and_keeps_the_last_good_checkpoint(phantom: Path, tmp_path: Path, train: Train) -> None:
    run = tmp_path / "run"
    with pytest.raises(PclmixError, match=r"step 3\b.*\bpoison\b"):
        train(phantom, run, *FOUR, method="diverging")
    checkpoint = load_checkpoint(run / LAST)
    assert checkpoint.step == 2
    assert all(torch.isfinite(tensor).all() for tensor in checkpoint.method.values())
    status = json.loads((run / "run.json").read_text())
    assert status["status"] == "failed"
    assert "step 3" in status["reason"]
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]


@pytest.mark.usefixtures("odd_methods")
def test_nan_between_log_lines_is_found_at_the_next(phantom: Path, tmp_path: Path, train: Train) -> None:
    with pytest.raises(PclmixError, match=r"step 3\b.*\bpoison\b"):
        train(phantom, tmp_path / "run", "engine.iterations=4", "engine.log_every=50", method="diverging")
    assert not (tmp_path / "run" / LAST).exists()


@pytest.mark.usefixtures("odd_methods")
def test_weights_that_are_not_finite_are_not_saved(phantom: Path, tmp_path: Path, train: Train) -> None:
    """The loss of step 3 is finite, its gradient is not: only the weights show it, and step 3 is a checkpoint."""
    run = tmp_path / "run"
    with pytest.raises(PclmixError, match=r"weights.*step 3\b"):
        train(phantom, run, "engine.iterations=4", "engine.save_every=1", method="steep")
    assert load_checkpoint(run / LAST).step == 2


@contextmanager
def full_disk(bytes_left: int) -> Iterator[None]:
    """No file may grow beyond `bytes_left`: the system itself refuses to write more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("bytes_left", [0, 1000, 300_000])
def test_a_full_disk_leaves_the_old_checkpoints(
    tmp_path: Path, bytes_left: int, make_checkpoint: Callable[..., Checkpoint]
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, make_checkpoint(step, 100_000))
    with full_disk(bytes_left), pytest.raises(PclmixError, match=r"last\.ckpt"):
        save_checkpoint(tmp_path, make_checkpoint(3, 100_000))
    assert load_checkpoint(tmp_path / LAST).step == 2
    assert load_checkpoint(tmp_path / PREVIOUS).step in (1, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [LAST, PREVIOUS]


def test_run_resumes_after_a_full_disk(
    phantom: Path, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, same_run: Callable[[Path, Path], None]
) -> None:
    run, calls = tmp_path / "run", []

    def filling_up(folder: Path, checkpoint: Checkpoint) -> None:
        calls.append(checkpoint.step)
        with full_disk(100_000 if len(calls) == 2 else 10**9):
            save_checkpoint(folder, checkpoint)

    monkeypatch.setattr(trainer, "save_checkpoint", filling_up)
    with pytest.raises(PclmixError, match=r"last\.ckpt"):
        train(phantom, run, *FOUR, method="pce")
    assert load_checkpoint(run / LAST).step == 2
    assert train(phantom, run, recipe=None, resume=True)[0]
    assert train(phantom, tmp_path / "unbroken", *FOUR, method="pce")[0]
    same_run(tmp_path / "unbroken", run)


def test_metrics_on_a_full_disk(tmp_path: Path) -> None:
    from pclmix.training.log import MetricLog

    log = MetricLog(tmp_path, 0)
    with full_disk(10), pytest.raises(PclmixError, match=r"metrics\.jsonl.*--resume"):
        log.write(1, {"loss": 1.0})


def test_out_of_memory_gives_one_message(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer, "Feed", full)
    message = refused()
    assert "cpu" in message
    assert "engine.batch=4" in message
    assert "data.size=[64, 64]" in message


def test_missing_dense_mask_is_named(refused: Callable[..., str], phantom: Path, tmp_path: Path) -> None:
    shutil.copytree(phantom, tmp_path / "data")
    (tmp_path / "data/referenceTr/phantom002_frame01.nii.gz").unlink()
    message = refused(method="full", dataset=tmp_path / "data")
    assert all(part in message for part in ("--method full", "1 of 6", "referenceTr/phantom002_frame01.nii.gz"))


@pytest.mark.parametrize("content", ["garbage: [", "3", ""])
def test_damaged_run_config_is_reported(phantom: Path, tmp_path: Path, train: Train, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(PclmixError, match=r"config\.yaml"):
        train(phantom, tmp_path, resume=True, recipe=None)
