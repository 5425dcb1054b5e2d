"""Killed, interrupted and damaged runs resume to the same result."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pclmix.config import Config
from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.training.checkpoint import LAST, PREVIOUS, Checkpoint, load_checkpoint
from pclmix.training.plan import require_same
from pclmix.training.request import TrainRequest

Train = Callable[..., tuple[bool, str]]
SHORT = ("engine.iterations=12", "engine.save_every=3")
DRAWN = random.SystemRandom()


def steps_logged(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.is_file() else 0


def wait_for(condition: Callable[[], bool], alive: Callable[[], bool], seconds: float = 300) -> None:
    limit = time.monotonic() + seconds
    while not condition() and alive():
        assert time.monotonic() < limit, "the process hangs"
        time.sleep(0.01)


def test_killed_at_random_moments(
    phantom: Path,
    unbroken: Path,
    tmp_path: Path,
    spawn: Callable[..., Any],
    same_run: Callable[[Path, Path], None],
) -> None:
    run = tmp_path / "run"
    moments = []
    # First the command itself: killed before there is a checkpoint, so that --resume starts again.
    command = [sys.executable, "-m", "pclmix", "train", phantom, "--out", run, "--recipe", "tiny", "--device", "cpu"]
    process = subprocess.Popen([*map(str, command), "--resume", *SHORT], stderr=subprocess.PIPE)
    wait_for(lambda: steps_logged(run) >= 2, lambda: process.poll() is None)
    process.kill()
    assert process.wait() == -signal.SIGKILL, process.stderr and process.stderr.read().decode()
    # Then at random steps, a random moment later: in a step, in a save, between a checkpoint and its metrics.
    for target in sorted(DRAWN.randint(1, 11) for _ in range(4)):
        child, _ = spawn(phantom, run, *SHORT, resume=True)
        pause = DRAWN.uniform(0, 0.3)
        moments.append((target, pause))
        began = (run / "metrics.jsonl").stat().st_ino  # a resumed run truncates its metrics and writes them again
        wait_for(
            lambda: (run / "metrics.jsonl").stat().st_ino != began and steps_logged(run) >= target,  # noqa: B023
            child.is_alive,
        )
        time.sleep(pause)
        child.kill()
        child.join()
    child, answer = spawn(phantom, run, *SHORT, resume=True)
    child.join()
    assert json.loads(answer.read_text()) is True
    try:
        same_run(unbroken, run)
    except AssertionError as error:
        raise AssertionError(f"killed at (step, seconds after it) {moments}") from error


def test_ctrl_c_saves_and_the_resume_is_exact(
    phantom: Path, unbroken: Path, tmp_path: Path, train: Train, same_run: Callable[[Path, Path], None]
) -> None:
    run = tmp_path / "run"

    def press() -> None:
        wait_for(lambda: steps_logged(run) >= 4, lambda: True)
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    finger = threading.Thread(target=press)
    finger.start()
    finished, said = train(phantom, run, *SHORT)
    finger.join()
    assert not finished
    assert f"pclmix train {phantom} --out {run} --resume --device cpu" in said
    assert 4 <= load_checkpoint(run / LAST).step < 12
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is handler
    # The printed command needs neither recipe nor settings.
    assert train(phantom, run, recipe=None, resume=True)[0]
    same_run(unbroken, run)


def test_ctrl_c_is_exit_code_130(
    phantom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pclmix.training.start
    from pclmix.cli import main

    monkeypatch.setattr(pclmix.training.start, "run_training", lambda *_, **__: False)
    monkeypatch.setattr(sys, "argv", ["pclmix", "train", str(phantom), "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 130


def damage(path: Path) -> None:
    """Flip a byte in the middle: the file still opens, and only its checksum tells."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    phantom: Path,
    unbroken: Path,
    tmp_path: Path,
    train: Train,
    same_run: Callable[[Path, Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    damage(run / LAST)
    (run / ".last-a1b2c3d4.ckpt").write_bytes(b"what a kill left")
    assert load_checkpoint(run / PREVIOUS).step == 9
    assert train(phantom, run, *SHORT, resume=True)[0]
    assert str(run / LAST) in caplog.text
    same_run(unbroken, run)
    damage(run / LAST)
    (run / PREVIOUS).write_bytes((run / PREVIOUS).read_bytes()[:1000])
    with pytest.raises(PclmixError, match=re.escape(str(run))):
        train(phantom, run, *SHORT, resume=True)


def test_killed_after_the_last_checkpoint(
    phantom: Path, unbroken: Path, tmp_path: Path, train: Train, same_run: Callable[[Path, Path], None]
) -> None:
    """All steps are done and saved, but run.json is not updated yet: resuming changes nothing."""
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    (run / "run.json").write_text('{"status": "running"}')
    assert train(phantom, run, recipe=None, resume=True)[0]
    same_run(unbroken, run)


def test_resuming_a_finished_run_prints_a_note(phantom: Path, unbroken: Path, train: Train) -> None:
    before = (unbroken / LAST).stat()
    finished, said = train(phantom, unbroken, recipe=None, resume=True)
    assert finished
    assert "12 steps" in said
    assert (unbroken / LAST).stat() == before


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"overrides": ["optim.lr=0.5"]}, r"optim\.lr: 0\.03.*0\.5"),
        ({"overrides": ["params.queue=3"]}, r"params\.queue: 50.*3"),
        ({"fold": 1}, "fold"),
        ({"recipe": "paper"}, "net: resnet10.*resnet50"),
    ],
)
def test_other_settings_are_refused(
    phantom: Path, unbroken: Path, train: Train, changed: dict[str, Any], named: str
) -> None:
    overrides = changed.pop("overrides", ())
    with pytest.raises(PclmixError, match=named):
        train(phantom, unbroken, *overrides, **{"recipe": None, "resume": True, **changed})


@pytest.mark.parametrize("change", ["missing", "new", "order"])
def test_other_cases_are_refused(phantom: Path, unbroken: Path, tmp_path: Path, train: Train, change: str) -> None:
    run, cases = tmp_path / "run", Dataset.open(phantom).cases
    shutil.copytree(unbroken, run)
    (run / "run.json").write_text('{"status": "running"}')  # a finished run would have nothing left to do
    now = list(cases[1:] if change == "missing" else cases)
    content = torch.load(run / LAST, weights_only=True)
    content["run"]["cases"] = {"missing": list(cases), "new": list(cases[1:]), "order": list(cases)[::-1]}[change]
    torch.save(content, run / LAST)
    named = {
        "missing": rf"\b{len(cases)} cases.*\b1 missing \({cases[0]}\)",
        "new": rf"\b{len(cases) - 1} cases.*\b1 new \({cases[0]}\)",
        "order": "order",
    }
    before = (run / LAST).read_bytes()
    with pytest.raises(PclmixError, match=named[change]):
        train(phantom, run, recipe=None, resume=True, cases=now)
    assert (run / LAST).read_bytes() == before


def test_a_checkpoint_of_an_earlier_version_lacks_settings(unbroken: Path) -> None:
    """Settings that the checkpoint lacks, of the run or of the method, take their defaults."""
    content = load_checkpoint(unbroken / LAST).to_plain()
    config = Config(**content["config"])
    del content["config"]["engine"]["keep_every"], content["config"]["params"]["lambda_t"]
    checkpoint = Checkpoint.from_plain(content, unbroken / LAST)
    require_same(checkpoint, config, None, unbroken)
    kept = config.model_copy(update={"engine": config.engine.model_copy(update={"keep_every": 5})})
    with pytest.raises(PclmixError, match=r"engine\.keep_every: 0.*5"):
        require_same(checkpoint, kept, None, unbroken)
    other = config.model_copy(update={"params": {**config.params, "lambda_t": 0.9}})
    with pytest.raises(PclmixError, match=r"params\.lambda_t: 0\.\d+.*0\.9"):
        require_same(checkpoint, other, None, unbroken)


def test_a_run_without_a_checkpoint_keeps_its_settings(
    phantom: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its first checkpoint, a run is started again by `--resume` with its own settings."""
    from pclmix.training import start

    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(unbroken / "config.yaml", run)
    (run / "run.json").write_text('{"status": "running", "fold": 2}')
    seen: dict[str, Any] = {}

    def instead(plan: Any, *_: Any) -> None:
        seen.update(config=plan.config, fold=plan.fold)
        raise PclmixError("far enough")

    monkeypatch.setattr(start, "prepare", instead)
    with pytest.raises(PclmixError, match="far enough"):
        start.run_training(TrainRequest(phantom, run, resume=True, device="cpu"))
    assert seen["config"].recipe == "tiny"
    assert seen["config"].engine.iterations == 12
    assert seen["fold"] == 2


def test_a_checkpoint_holds_plain_values_only(unbroken: Path) -> None:
    content = torch.load(unbroken / LAST, weights_only=True)
    assert content["labels"]["names"] == ["background", "RV", "Myo", "LV"]
    assert set(content["spacing"]) == {"median", "min", "max"}
    assert {"version", "config", "channels", "random", "optimizer", "average"} <= set(content)
    assert int(content["method"]["queue.count"].sum()) > 0
