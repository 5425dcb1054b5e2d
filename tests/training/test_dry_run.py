"""`train --dry-run` forecasts a training and writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pclmix.errors import PclmixError
from pclmix.training.request import TrainRequest
from pclmix.training.start import dry_run


def request_of(dataset: Path, out: Path, *overrides: str) -> TrainRequest:
    return TrainRequest(dataset, out, recipe="tiny", overrides=overrides, fold=1, device="cpu")


def test_a_forecast_and_no_files(phantom_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "cache"))
    forecast = dry_run(request_of(phantom_dataset, tmp_path / "run", "engine.iterations=7"))
    assert forecast.cases == 4
    assert forecast.steps == 7
    assert forecast.parameters[0] > forecast.parameters[1] > 0
    assert forecast.seconds == pytest.approx(7 * forecast.step_seconds)
    assert forecast.memory > 0
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()


def test_a_setting_that_cannot_work_is_refused(phantom_dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(PclmixError, match=r"engine\.batch"):
        dry_run(request_of(phantom_dataset, tmp_path / "run", "engine.batch=1"))
