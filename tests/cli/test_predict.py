"""`pclmix predict` and `pclmix crossval` as a user calls them."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from rich.console import Console

from pclmix.cli import main
from pclmix.io.files import read_json, write_json
from pclmix.io.volume import read_image, read_labels
from pclmix.metrics import read_summary
from pclmix.training.request import TrainRequest

Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Exit code and everything printed."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["pclmix", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), " ".join((captured.out + captured.err).split())

    return run


def test_predict_then_evaluate(call: Call, tiny_run: Path, phantom_dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "predictions"
    code, text = call("predict", tiny_run, phantom_dataset, out, "--fold", 1, "--device", "cpu")
    assert code == 0, text
    first = {path.name: path.stat().st_mtime_ns for path in out.glob("*.nii.gz")}
    assert len(first) == 2
    code, text = call("predict", tiny_run, phantom_dataset, out, "--device", "cpu", "--batch", 3)
    assert code == 0
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.nii.gz")}.items() > first.items()
    assert re.search(r"\b4\b.*\b2\b", text)  # predicted and left as they were
    assert re.search(r"trained on 4\b", text)
    code, text = call("evaluate", out, phantom_dataset, "--out", tmp_path / "scores.json")
    assert code == 0
    assert len(read_summary(tmp_path / "scores.json").cases) == 6


@pytest.mark.parametrize(
    ("flags", "options"),
    [(("--tta", "flip"), {"tta": "flip"}), (("--largest-component",), {"largest_component": True})],
)
def test_options_reach_the_predictor(
    call: Call,
    lively_model: Path,
    phantom_dataset: Path,
    tmp_path: Path,
    flags: tuple[str, ...],
    options: dict[str, str],
) -> None:
    from pclmix import load

    whole = nib.load(phantom_dataset / "imagesTr" / "phantom001_frame01_0000.nii.gz")
    nib.save(whole.slicer[30:80, 20:90, 1:6], tmp_path / "part_0000.nii.gz")
    code, text = call(
        "predict", lively_model, tmp_path / "part_0000.nii.gz", tmp_path / "out", *flags, "--device", "cpu"
    )
    assert code == 0, text
    predictor, array = load(lively_model, device="cpu"), read_image(tmp_path / "part_0000.nii.gz").array
    labels, _ = read_labels(tmp_path / "out" / "part.nii.gz")
    np.testing.assert_array_equal(labels, predictor.predict(array, **options))
    assert (labels != predictor.predict(array)).any()
    assert read_json(tmp_path / "out" / "prediction.json").items() >= options.items()


def test_a_bad_file_is_exit_2_at_the_end(call: Call, tiny_run: Path, phantom_dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(phantom_dataset / "imagesTr", tmp_path / "in")
    (tmp_path / "in" / "phantom002_frame01_0000.nii.gz").write_bytes(b"\x1f\x8b nonsense")
    code, text = call("predict", tiny_run, tmp_path / "in", tmp_path / "out", "--device", "cpu")
    assert code == 2
    assert len(list((tmp_path / "out").glob("*.nii.gz"))) == 5
    assert "1 of 6" in text
    assert "phantom002_frame01_0000.nii.gz" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("{set}", "{run}", "{out}"), ("{set}", "MODEL")),
        (("{set}/imagesTr/phantom001_frame01_0000.nii.gz", "{run}", "{out}"), ("_0000.nii.gz", "MODEL")),
        (("{set}/imagesTr", "{set}", "{out}"), ("{set}/imagesTr", "last.ckpt")),
        (("{run}", "nowhere", "{out}"), ("nowhere", "INPUT")),
        (("{run}", "{set}", "{out}", "--fold", "9"), ("fold 9", "splits_final.json")),
        (("{run}", "{set}", "{out}", "--device", "gpu"), ("--device gpu",)),
        (("{run}", "{set}", "{out}", "--batch", "0"), ("--batch 0",)),
        (("{run}", "{set}/imagesTr", "{set}/../set/imagesTr"), ("{set}/../set/imagesTr", "OUT")),
    ],
)
def test_mistakes(
    call: Call, tiny_run: Path, phantom_dataset: Path, tmp_path: Path, arguments: tuple[str, ...], named: tuple[str]
) -> None:
    paths = {"run": tiny_run, "set": phantom_dataset, "out": tmp_path / "out"}
    code, text = call("predict", *(a.format(**paths) for a in arguments))
    assert code == 2
    assert all(part.format(**paths) in text for part in named), text
    assert not (tmp_path / "out").exists()


def test_crossval(call: Call, phantom_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "cv"
    command = ["crossval", phantom_dataset, "--out", out, "--recipe", "tiny", "--method", "pce", "--device", "cpu"]
    code, text = call(*command, "--iterations", 2, "--folds", "3")
    assert code == 0, text
    first = (out / "fold3" / "evaluation.json").stat().st_mtime_ns
    code, text = call(*command, "--iterations", 2, "--folds", "1,3")
    assert code == 0, text
    assert "fold 3" in text
    assert (out / "fold3" / "evaluation.json").stat().st_mtime_ns == first
    cases = {f"phantom{p:03d}_frame{f:02d}" for p in (1, 3) for f in (1, 2)}
    for summary in (read_summary(out / "evaluation.json"), read_summary(out / "cases.csv")):
        assert {entry.case for entry in summary.cases} == cases
    assert (out / "fold1" / "cases.csv").is_file()
    assert sorted(p.name for p in (out / "fold1" / "predictions").glob("*.nii.gz")) == [
        "phantom001_frame01.nii.gz",
        "phantom001_frame02.nii.gz",
    ]
    code, text = call(*command, "--iterations", 3, "--folds", "1")
    assert code == 2
    assert "engine.iterations" in text


def test_crossval_resumes_an_interrupted_fold(
    phantom_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training stops half-way in fold 1, prediction then fails once: each call continues from there."""
    from pclmix.studies import work
    from pclmix.studies.execute import Devices
    from pclmix.studies.plan import Settings
    from pclmix.studies.study import CrossValidation, cross_validate

    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "cache"))
    train, calls = work.run_training, []

    def interrupted(request: TrainRequest, console: Console) -> bool:
        calls.append(request.resume)
        return False if len(calls) == 1 else train(request, console)

    monkeypatch.setattr(work, "run_training", interrupted)
    settings = Settings("pce", "tiny", ("engine.iterations=2",))

    def go() -> CrossValidation:
        return cross_validate(phantom_dataset, tmp_path / "cv", settings, folds="1", devices=Devices("cpu"))

    with pytest.raises(KeyboardInterrupt):
        go()
    assert read_json(tmp_path / "cv" / "fold1" / "node.json")["status"] == "interrupted"
    result = go()
    assert result.summary is not None
    assert list(result.folds) == [1]
    assert calls == [True, True]
    record = read_json(tmp_path / "cv" / "fold1" / "node.json")
    assert record["status"] == "finished"
    assert [entry["status"] for entry in record["earlier"]] == ["interrupted"]


@pytest.mark.parametrize(("folds", "way_out"), [("1-4", "1 to 3"), ("0", "1 to 3"), ("one", "1-5"), ("3-1", "1-3")])
def test_folds_refused(call: Call, phantom_dataset: Path, tmp_path: Path, folds: str, way_out: str) -> None:
    code, text = call("crossval", phantom_dataset, "--out", tmp_path / "cv", "--folds", folds)
    assert code == 2
    assert f"--folds {folds}" in text
    assert way_out in text
    assert not (tmp_path / "cv").exists()


def test_overlapping_folds_are_refused(call: Call, phantom_dataset: Path, tmp_path: Path) -> None:
    root = tmp_path / "set"
    shutil.copytree(phantom_dataset, root)
    splits = read_json(root / "splits_final.json")
    write_json(root / "splits_final.json", [splits[0], splits[0]])
    code, text = call("crossval", root, "--out", tmp_path / "cv")
    assert code == 2
    assert all(part in text for part in ("splits_final.json", splits[0]["val"][0], "fold 1", "fold 2"))


def test_crossval_needs_two_patients(call: Call, phantom_dataset: Path, tmp_path: Path) -> None:
    root = tmp_path / "set"
    shutil.copytree(phantom_dataset, root)
    splits = read_json(root / "splits_final.json")
    write_json(root / "splits_final.json", [{**splits[0], "train": []}])
    for command in (["crossval", root], ["train", root, "--fold", 1]):
        code, text = call(*command, "--out", tmp_path / "out", "--recipe", "tiny", "--device", "cpu")
        assert code == 2
        assert all(part in text for part in (str(root), "fold 1", "`pclmix split`"))
        assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_other_classes_is_refused(
    call: Call, tiny_run: Path, phantom_dataset: Path, tmp_path: Path
) -> None:
    root = tmp_path / "set"
    shutil.copytree(phantom_dataset, root)
    content = read_json(root / "dataset.json")
    labels = {"background": 0, "RV": 1, "heart": 2, "ignore": 3}
    write_json(root / "dataset.json", {**content, "labels": labels, "habits": {}})
    code, text = call("predict", tiny_run, root, tmp_path / "out", "--device", "cpu")
    assert code == 2
    assert all(part in text for part in (str(root), "background, RV, Myo, LV", "background, RV, heart"))
    shutil.copytree(tiny_run, tmp_path / "run")
    code, text = call("train", root, "--out", tmp_path / "run", "--resume", "--device", "cpu")
    assert code == 2
    assert all(part in text for part in (str(root), "background, RV, Myo, LV", "background, RV, heart"))
