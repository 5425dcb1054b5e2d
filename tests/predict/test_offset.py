"""An offset is added to the score of a class: the same for a run trained with it, a predictor and what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import pclmix
from pclmix.cli import app
from pclmix.data.volume import read_image
from pclmix.engine.checkpoint import LAST, load_checkpoint
from pclmix.engine.start import run_training
from pclmix.errors import PclmixError
from pclmix.export.onnx import export_onnx
from pclmix.files import read_json
from pclmix.predict import load
from pclmix.predict.dual import DualPredictor, load_uncertain
from pclmix.predict.files import predict_files

OFFSET = {"LV": 2.0, "background": -0.5}
ADDED = np.array([-0.5, 0.0, 0.0, 2.0], np.float32)[:, None, None]


@pytest.fixture(scope="module")
def volume(phantom_dataset: Path) -> np.ndarray:
    return read_image(phantom_dataset / "imagesTr" / "phantom001_frame01_0000.nii.gz").array[0, 2:5]


@pytest.fixture(scope="module")
def offset_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_run` as if it had been trained with the offset: nothing in training looks at it."""
    run = tmp_path_factory.mktemp("offset") / "run"
    run.mkdir()
    content = load_checkpoint(tiny_run / LAST)
    torch.save({**content, "config": {**content["config"], "offset": OFFSET}}, run / LAST)
    return run


def test_it_is_added_to_the_scores(tiny_run: Path, volume: np.ndarray) -> None:
    plain, shifted = (load(tiny_run, device="cpu", offset=o).logits(volume) for o in (None, OFFSET))
    np.testing.assert_allclose(shifted, plain + ADDED, rtol=1e-5, atol=1e-4)


def test_a_run_has_its_own_which_a_caller_can_replace(tiny_run: Path, offset_run: Path, volume: np.ndarray) -> None:
    plain = load(tiny_run, device="cpu").logits(volume)
    np.testing.assert_allclose(load(offset_run, device="cpu").logits(volume), plain + ADDED, rtol=1e-5, atol=1e-4)
    assert np.array_equal(load(offset_run, device="cpu", offset={}).logits(volume), plain)
    assert np.array_equal(
        pclmix.load(offset_run, device="cpu", offset={"LV": 1e4}).predict(volume), np.full(volume.shape, 3)
    )


def test_both_decoders_have_it(tiny_run: Path, offset_run: Path, volume: np.ndarray) -> None:
    plain, own, given = (
        load_uncertain(tiny_run, device="cpu"),
        load_uncertain(offset_run, device="cpu"),
        load_uncertain(tiny_run, device="cpu", offset=OFFSET),
    )
    for shifted in (own, given):
        assert isinstance(plain, DualPredictor)
        assert isinstance(shifted, DualPredictor)
        for before, after in zip(plain.native_logits(volume), shifted.native_logits(volume), strict=True):
            np.testing.assert_allclose(after, before + ADDED, rtol=1e-5, atol=1e-4)


def test_a_calibration_is_not_taken_over(tiny_run: Path, offset_run: Path) -> None:
    assert load(tiny_run, device="cpu").about.identity != load(offset_run, device="cpu").about.identity


def test_an_exported_file_has_it_built_in(offset_run: Path, volume: np.ndarray, tmp_path: Path) -> None:
    export_onnx(offset_run, tmp_path / "model.onnx")
    expected = load(offset_run, device="cpu").logits(volume)
    np.testing.assert_allclose(
        load(tmp_path / "model.onnx", device="cpu").logits(volume), expected, rtol=1e-4, atol=1e-3
    )
    with pytest.raises(PclmixError, match=r"model\.onnx has its offset built in; --offset is for a run folder"):
        load(tmp_path / "model.onnx", device="cpu", offset=OFFSET)


def test_a_class_that_is_not_there_is_refused_before_training(phantom_dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(PclmixError, match=r"offset\.Lv: there is no class 'Lv' here\. Did you mean 'LV'\?"):
        run_training(phantom_dataset, tmp_path / "run", recipe="tiny", overrides=["offset.Lv=1"], device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["nan", ".inf", "-.inf", "much"])
def test_what_is_no_number_is_refused_before_training(phantom_dataset: Path, tmp_path: Path, value: str) -> None:
    with pytest.raises(PclmixError, match=r"offset\.LV="):
        run_training(phantom_dataset, tmp_path / "run", recipe="tiny", overrides=[f"offset.LV={value}"], device="cpu")


@pytest.mark.parametrize("offset", [{"LV": "2"}, {"LV": None}, {"LV": float("nan")}, "LV=1", {3: 1.0}])
def test_mistakes_in_python(tiny_run: Path, offset: Any) -> None:
    with pytest.raises(PclmixError, match="offset"):
        pclmix.load(tiny_run, device="cpu", offset=offset)


def test_a_resume_has_to_keep_it(phantom_dataset: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"recipe": "tiny", "method": "pce", "fold": 1, "device": "cpu"}
    steps = "engine.iterations=2"
    run_training(phantom_dataset, tmp_path / "run", overrides=[steps, "offset.LV=2", "data.inside.LV=0.5"], **settings)
    with pytest.raises(PclmixError, match=r"data\.inside\.LV: 0\.5 then, None now, offset\.LV: 2\.0 then, None now"):
        run_training(phantom_dataset, tmp_path / "run", overrides=[steps], resume=True, **settings)


def test_predictions_say_which(tiny_run: Path, phantom_dataset: Path, tmp_path: Path) -> None:
    image = phantom_dataset / "imagesTr" / "phantom001_frame01_0000.nii.gz"
    predict_files(load(tiny_run, device="cpu", offset=OFFSET), image, tmp_path)
    assert read_json(tmp_path / "prediction.json")["offset"] == OFFSET
    with pytest.raises(PclmixError, match="another setting of offset"):
        predict_files(load(tiny_run, device="cpu"), image, tmp_path)


@pytest.mark.parametrize(
    ("given", "said"),
    [("LV", "a name and a number are needed"), ("LV=x", "such as --offset LV=1.5"), ("lv=1", "Did you mean 'LV'?")],
)
def test_mistakes_on_the_command_line(
    tiny_run: Path, phantom_dataset: Path, tmp_path: Path, given: str, said: str
) -> None:
    out = tmp_path / "out"
    words = ["predict", str(tiny_run), str(phantom_dataset), str(out), "--offset", given, "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, PclmixError)
    assert said in str(result.exception)
    assert not out.exists()


def test_each_name_is_given_once(tiny_run: Path, phantom_dataset: Path, tmp_path: Path) -> None:
    words = ["predict", str(tiny_run), str(phantom_dataset), str(tmp_path / "out"), "--offset", "LV=1", "--offset"]
    result = CliRunner().invoke(app, [*words, "LV=2"])
    assert isinstance(result.exception, PclmixError)
    assert str(result.exception) == "--offset LV=2: LV has a value already; give each name once"


def test_on_the_command_line(tiny_run: Path, phantom_dataset: Path, tmp_path: Path) -> None:
    image = phantom_dataset / "imagesTr" / "phantom001_frame01_0000.nii.gz"
    words = ["predict", str(tiny_run), str(image), str(tmp_path / "out"), "--offset", "LV=1e4", "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    (found,) = (tmp_path / "out").glob("*.nii.gz")
    assert set(np.unique(read_image(found).array)) == {3}
