"""Study folders: content and progress."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pclmix.errors import PclmixError
from pclmix.studies.plan import Record, Run, Settings, Study, is_done, read_record, read_study, write_record
from pclmix.studies.status import Follower, State, read_states, render, time_left

SETTINGS = Settings("pce", "tiny", ("engine.iterations=10",))
RUNS = tuple(Run(f"a/fold{fold}", fold, SETTINGS, "a") for fold in (1, 2, 3))


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(tmp_path / "study", "sweep", tmp_path / "data", RUNS).begin()


def begun(study: Study, run: Run, steps: int, **known: Any) -> Path:
    """A run folder after some steps, with a node's record."""
    folder = study.place(run)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("engine: {iterations: 10, seconds: null}\n")
    lines = [json.dumps({"step": step, "loss": 1.0 / step}) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    now = time.time()
    record = Record("running", "host", "10.0.0.1", "cpu", 1, 7, now - 20, now)
    write_record(folder, replace(record, **known))
    return folder


def test_study_can_be_extended(study: Study) -> None:
    assert read_study(study.folder) == study
    more = Run("b/fold1", 1, SETTINGS, "b")
    grown = replace(study, runs=(*RUNS[:1], more)).begin()
    assert grown.id == study.id
    assert {run.folder for run in grown.runs} == {"a/fold1", "a/fold2", "a/fold3", "b/fold1"}
    assert str(study.folder) in (study.folder / "README.txt").read_text()


def test_started_run_keeps_its_settings(study: Study) -> None:
    other = replace(RUNS[0], settings=replace(SETTINGS, overrides=("engine.iterations=11",)))
    replace(study, runs=(other,)).begin()  # nothing has begun: it may change
    begun(study, RUNS[0], 1)
    with pytest.raises(PclmixError) as caught:
        replace(study, runs=RUNS[:1]).begin()
    assert "overrides" in str(caught.value)
    assert str(study.place(RUNS[0])) in str(caught.value)


@pytest.mark.parametrize("key", ["kind", "dataset"])
def test_another_study_is_refused(study: Study, key: str) -> None:
    changed = replace(study, **{key: "crossval" if key == "kind" else Path("/elsewhere")})
    with pytest.raises(PclmixError, match=str(study.folder)):
        changed.begin()


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.doc").write_text("precious")
    with pytest.raises(PclmixError, match="exists already"):
        Study(tmp_path, "sweep", tmp_path / "data", RUNS).begin()
    with pytest.raises(PclmixError, match=r"study\.json"):
        read_study(tmp_path)
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(PclmixError, match=r"study\.json"):
        read_study(tmp_path)


def test_states_of_runs(study: Study) -> None:
    begun(study, RUNS[0], 4)
    begun(study, RUNS[1], 6, seen=time.time() - 600)
    running, silent, waiting = read_states(study)
    assert (running.status, running.node, running.step, running.best) == ("running", "host 10.0.0.1", 4, "loss 0.250")
    assert running.share == pytest.approx(0.4)
    assert running.left == pytest.approx(30, rel=0.1)  # 20 s for 4 of 10 steps
    assert (silent.status, silent.left) == ("silent", None)
    assert waiting == State(RUNS[2], "waiting")


def test_a_resumed_run_is_timed_from_where_it_resumed(study: Study) -> None:
    begun(study, RUNS[0], 6, from_step=4)
    state = read_states(study)[0]
    assert state.left == pytest.approx(40, rel=0.1)  # 20 s for 2 steps, 4 left


def test_the_start_of_a_run_is_no_part_of_its_pace(study: Study) -> None:
    folder = begun(study, RUNS[0], 4)  # 20 s ago
    (folder / "environment.json").write_text("{}")
    os.utime(folder / "environment.json", (time.time() - 8,) * 2)
    assert read_states(study)[0].left == pytest.approx(12, rel=0.1)


def test_follower_reads_appended_lines(study: Study) -> None:
    folder = begun(study, RUNS[0], 2)
    follower = Follower(study, RUNS[0])
    assert follower.state().step == 2
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 0.9, "validation/recall": 0.5}\n{"step": 4, "lo')
    assert (follower.state().step, follower.state().best) == (3, "recall 50.0 %")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 0.7}\n')  # resumed from the checkpoint before
    assert (follower.state().step, follower.state().best) == (1, "loss 0.700")


def test_a_run_without_its_configuration_has_no_time_left_yet(study: Study) -> None:
    """A run's record is written first; a follower that is there early must not keep the defaults of an empty one."""
    folder = begun(study, RUNS[0], 0)
    config = folder / "config.yaml"
    content = config.read_text()
    config.unlink()
    follower = Follower(study, RUNS[0])
    assert follower.state().left is None
    config.write_text(content)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {k}, "loss": 1.0}}\n' for k in range(1, 6)))
    assert follower.state().share == pytest.approx(0.5)
    assert follower.state().left == pytest.approx(20, rel=0.1)


def test_brackets_in_names_are_shown(tmp_path: Path) -> None:
    """Paths and values may hold what rich takes for markup."""
    run = Run("a/fold1", 1, SETTINGS, "weights=/w[/x].pth")
    state = State(run, "finished", "host[1]", best="Dice 50.0 %", dice=0.5)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render([state], "sweep /data/[old]/s[/y]"))
    shown = console.export_text()
    assert "sweep /data/[old]/s[/y]" in shown
    assert "host[1]" in shown
    assert shown.count("weights=/w[/x].pth, fold 1") == 2  # its row, and the best so far


def test_finished_and_failed_runs(study: Study) -> None:
    folder = begun(study, RUNS[0], 10, status="finished")
    assert not is_done(folder)
    (folder / "evaluation.json").write_text(json.dumps({"mean": {"Dice": 0.5}}))
    begun(study, RUNS[1], 3, status="failed", reason="out of memory")
    write_record(study.place(RUNS[1]), replace(read_record(study.place(RUNS[1])), reason="no scribbles"))  # type: ignore[type-var]
    unscored = begun(study, RUNS[2], 10, status="finished", scored=False)
    assert is_done(unscored)
    states = read_states(study)
    assert [(state.status, state.dice) for state in states] == [("finished", 0.5), ("failed", None), ("finished", None)]
    assert states[1].reason == "no scribbles"
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(states, "study", rows=2))
    shown = console.export_text()
    assert "3 runs: 1 failed, 2 finished" in shown
    assert "best so far: a, fold 1, Dice 50.0 %" in shown
    assert "a, fold 2" in shown  # what failed is shown before what is finished
    assert "a, fold 3" not in shown


def test_time_left_counts_waiting_runs() -> None:
    run = RUNS[0]
    done, one, two = (
        State(run, "finished", took=60.0),
        State(run, "running", left=30.0),
        State(run, "running", left=10.0),
    )
    waiting = State(run, "waiting")
    assert time_left([done, one, two]) == 30.0
    assert time_left([done, one, two, waiting, waiting]) == 30.0 + 2 * 60.0 / 2
    assert time_left([one, waiting]) is None
    assert time_left([done]) is None
