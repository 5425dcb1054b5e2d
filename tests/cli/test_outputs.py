"""Long-running commands refuse unwritable outputs before the work."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from pclmix.cli import main

COMMANDS = {
    "evaluate --out": "evaluate {data}/referenceTr {data} --out {bad}/s.json",
    "evaluate --csv": "evaluate {data}/referenceTr {data} --csv {bad}/s.csv",
    "compare": "compare {data}/referenceTr --reference {data} --out {bad}/cmp",
    "export": "export {model} {bad}/m.onnx",
    "export bundle": "export {model} {bad}/bundle --format bundle",
    "predict": "predict {model} {data} {bad}/out",
    "predict a file": "predict {model} {data}/imagesTr/phantom001_frame01_0000.nii.gz {bad}/out.nii.gz",
    "train": "train {data} --out {bad}/run --recipe tiny",
    "train --resume": "train {data} --out {bad}/run --recipe tiny --resume",
    "crossval": "crossval {data} --out {bad}/cv --recipe tiny",
    "ablate": "ablate {data} --out {bad}/study --recipe tiny",
    "sweep": "sweep {data} seed=1,2 --out {bad}/study --recipe tiny",
    "dicom": "dicom {data}/imagesTr {bad}/a.nii.gz",
    "scribble": "scribble {data} {bad}/out",
    "import": "import folder {data}/imagesTr {bad}/out --scribbles {data}/labelsTr",
    "phantom": "phantom {bad}/out",
    "demo": "demo --out {bad}/demo",
}
#: Expensive functions that must not be called.
WORK = (
    "pclmix.metrics.run.score_pair",
    "pclmix.report.tables.evaluate",
    "pclmix.inference.torch.open_model",
    "pclmix.training.start.prepare",
    "pclmix.io.dicom.read_series",
    "pclmix.synth.weaken.read_labels",
    "pclmix.synth.phantom._write_image",
)


def refused(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["pclmix", *command])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_outputs_are_checked_first(
    name: str,
    phantom_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def too_late(*_: object, **__: object) -> None:
        pytest.fail("the work had begun")

    for target in WORK:
        monkeypatch.setattr(target, too_late)
    bad = tmp_path / "file"
    bad.write_text("not a folder")
    words = {"data": phantom_dataset, "model": "model-that-is-not-read", "bad": bad}
    refused(monkeypatch, [part.format(**words) for part in COMMANDS[name].split()])
    message = capsys.readouterr().err
    assert os.strerror(errno.ENOTDIR) in message
    assert str(bad) in message
    assert bad.read_text() == "not a folder"


@pytest.mark.parametrize("command", ["ablate", "sweep"])
def test_a_study_refuses_a_file_as_its_folder(
    command: str,
    phantom_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    grid = ["seed=1,2"] if command == "sweep" else []
    refused(monkeypatch, [command, str(phantom_dataset), *grid, "--out", str(tmp_path / "file"), "--recipe", "tiny"])
    message = capsys.readouterr().err
    assert str(tmp_path / "file") in message
    assert "--out" in message


def test_equal_output_names_are_refused(
    phantom_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--out", str(tmp_path / "s.json"), "--csv", str(tmp_path / "s.json")]
    refused(monkeypatch, ["evaluate", str(phantom_dataset / "referenceTr"), str(phantom_dataset), *both])
    message = capsys.readouterr().err
    assert all(name in message for name in ("--out", "--csv", "s.json"))
    assert not (tmp_path / "s.json").exists()


def test_a_missing_permission_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def locked(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "locked/x")

    monkeypatch.setattr("pclmix.data.check.check_folder", locked)
    refused(monkeypatch, ["check", "locked/x"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "locked/x" in line
    assert os.strerror(errno.EACCES) in line
