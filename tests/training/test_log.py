"""Files of a run folder."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml

from pclmix.config import Config, load_config
from pclmix.training.log import Display, MetricLog, environment, read_config, read_metrics, start_run, write_status
from pclmix.training.scores import CASES


def test_files_of_a_run(unbroken: Path) -> None:
    config = Config.model_validate(yaml.safe_load((unbroken / "config.yaml").read_text()))
    assert config.recipe == "tiny"
    assert config.params["queue"] == 50  # resolved: the recipe's deviation and the method's own defaults
    assert config.params["temperature"] == 0.07
    about = json.loads((unbroken / "environment.json").read_text())
    assert about["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert about["threads"] == 1
    assert about["device"] == "cpu"
    status = json.loads((unbroken / "run.json").read_text())
    assert status["status"] == "finished"
    assert status["step"] == 12
    assert list((unbroken / "tensorboard").iterdir())
    with (unbroken / CASES).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["case"] for row in rows] == [f"phantom00{p}_frame0{f}" for p in (1, 2, 3) for f in (1, 2)]
    assert all(int(row["RV_pixels"]) > 0 and 0 <= float(row["RV_agreement"]) <= 1 for row in rows)


def test_a_line_of_metrics(unbroken: Path) -> None:
    lines = read_metrics(unbroken)
    assert [line["step"] for line in lines] == list(range(1, 13))
    weights = {"loss/sup": 1.0, "loss/ctr": 0.15, "loss/het": 1.0, "loss/mix": 1.0}
    for line in lines:
        assert set(line) == {"step", "round", "loss", "lr", *weights}
        assert line["round"] == 1
        assert line["loss"] == pytest.approx(sum(w * line[name] for name, w in weights.items()), abs=1e-4)
    assert lines[-1]["lr"] == 0.001


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    log = MetricLog(tmp_path, 0)
    for step in range(1, 6):
        log.write(step, {"loss": 0.1 * step}, speed=1.0)
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # a kill in the middle of a line
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    MetricLog(tmp_path, 3).close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:3]
    assert read_metrics(tmp_path / "nowhere") == []


def test_the_config_of_a_run_is_read_back(tmp_path: Path) -> None:
    config = load_config("tiny")
    start_run(tmp_path / "run", config, "cpu")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["config.yaml", "environment.json"]
    assert read_config(tmp_path / "run") == config.model_dump(mode="json")
    assert read_config(tmp_path / "nowhere") is None


def test_status_is_merged(tmp_path: Path) -> None:
    write_status(tmp_path, status="running", step=1)
    write_status(tmp_path, status="finished")
    assert json.loads((tmp_path / "run.json").read_text()) == {"status": "finished", "step": 1}


def test_the_environment_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/some/where/pclmix", "train", "data"])
    assert environment("cpu")["command"] == ["pclmix", "train", "data"]


def test_the_display_on_a_terminal_and_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    said = io.StringIO()
    with Display("pclmix", Console(file=said, force_terminal=True, width=200)) as display:
        display.show(3, 0.5, {"loss": 1.25, "loss/sup": 0.75}, 2.0)
    for word in ("pclmix", "step 3", "2.0/s", "loss 1.250", "sup 0.750"):
        assert word in said.getvalue()
    plain = io.StringIO()
    monkeypatch.setattr("pclmix.training.log._SECONDS_BETWEEN_LINES", 0.0)
    for quiet in (False, True):
        with Display("pclmix", Console(file=plain, width=200), quiet=quiet) as display:
            display.show(3, 0.5, {"loss": 1.25}, 2.0)
    assert plain.getvalue() == " 50%  step 3  2.0/s  loss 1.250\n"
