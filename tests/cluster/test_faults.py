"""Killed processes and nodes do not change the results of studies."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow
Start = Callable[..., "subprocess.Popen[str]"]
ITERATIONS = 400
LONG = (
    "--recipe",
    "tiny",
    "--device",
    "cpu",
    "--method",
    "pce",
    f"engine.iterations={ITERATIONS}",
    "engine.save_every=20",
)


@pytest.fixture(scope="module")
def undisturbed(phantom_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folds 1 and 2 in one process with one thread."""
    root = tmp_path_factory.mktemp("undisturbed")
    command = [
        sys.executable,
        "-m",
        "pclmix",
        "crossval",
        phantom_dataset,
        "--out",
        root / "cv",
        "--folds",
        "1-2",
        *LONG,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PCLMIX_CACHE": str(root / "cache")}
    subprocess.run([*map(str, command), "--cores", "1"], check=True, env=env, capture_output=True)
    return root / "cv"


def lines(run: Path) -> int:
    try:
        return len((run / "metrics.jsonl").read_bytes().splitlines())
    except OSError:
        return 0


def record(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "node.json").read_text())
    return content


def wait_for(condition: Callable[[], bool], driver: subprocess.Popen[str], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert driver.poll() is None, f"the driver ended: {driver.communicate()[0]}"
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.05)


def fewest_lines_until_done(run: Path, driver: subprocess.Popen[str]) -> int:
    """The smallest length of metrics.jsonl from now on: a run that began anew would cut it to nothing."""
    fewest = lines(run)
    while driver.poll() is None:
        fewest = min(fewest, lines(run) or fewest)
        time.sleep(0.02)
    return fewest


def equal(run: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "cases.csv", "training_cases.csv"):
        assert (run / name).read_bytes() == (other / name).read_bytes(), name
    for path in (other / "predictions").glob("*.nii.gz"):
        assert (run / "predictions" / path.name).read_bytes() == path.read_bytes(), path.name
    one, two = (torch.load(folder / "last.ckpt", weights_only=True)["method"] for folder in (run, other))
    assert all(torch.equal(one[name], two[name]) for name in two)


def finish(driver: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = driver.communicate(timeout=240)
    assert driver.returncode == code, output
    return output


def test_a_killed_worker_resumes(two_nodes: Any, pclmix: Start, phantom_dataset: Path, undisturbed: Path) -> None:
    out = two_nodes.shared / "worker"
    run = out / "fold1"
    driver = pclmix("crossval", phantom_dataset, "--out", out, "--folds", "1", *LONG, "--cluster", two_nodes.address)
    wait_for(lambda: lines(run) > 60, driver)
    os.kill(record(run)["pid"], signal.SIGKILL)
    assert fewest_lines_until_done(run, driver) >= 40
    output = finish(driver)
    assert "lost" in output
    found = record(run)
    assert found["attempt"] == 2
    assert found["from_step"] >= 40
    assert [entry["status"] for entry in found["earlier"]] == ["running"]
    equal(run, undisturbed / "fold1")


def test_run_of_a_lost_node_resumes_on_another(
    two_nodes: Any, pclmix: Start, phantom_dataset: Path, undisturbed: Path
) -> None:
    """Only transferred files of the run on the second node remain."""
    data, out = two_nodes.hidden / "lost-data", two_nodes.hidden / "lost"
    shutil.copytree(phantom_dataset, data)
    command = ("crossval", data, "--out", out, "--folds", "1-2", *LONG, "--cluster", two_nodes.address)
    driver = pclmix(*command)
    try:

        def carried() -> bool:
            return any(
                (run / "last.ckpt").is_file() and record(run)["address"] == "127.0.0.3"
                for run in (out / "fold1", out / "fold2")
                if (run / "node.json").is_file()
            )

        wait_for(carried, driver)
        two_nodes.kill("second")
        output = finish(driver)
    finally:
        if "second" not in two_nodes.started:
            two_nodes.start("second")
            two_nodes.wait()
    assert "lost" in output
    (moved,) = [run for run in (out / "fold1", out / "fold2") if record(run)["attempt"] == 2]
    assert record(moved)["address"] == "127.0.0.2"
    assert record(moved)["from_step"] >= 20
    assert [entry["address"] for entry in record(moved)["earlier"]] == ["127.0.0.3"]
    for fold in ("fold1", "fold2"):
        equal(out / fold, undisturbed / fold)


def test_study_resumes_after_a_killed_driver(
    two_nodes: Any, pclmix: Start, phantom_dataset: Path, undisturbed: Path
) -> None:
    out = two_nodes.shared / "driver"
    command = ("crossval", phantom_dataset, "--out", out, *LONG, "--cluster", two_nodes.address)
    finish(pclmix(*command, "--folds", "1"))
    done = {path: path.stat().st_mtime_ns for path in (out / "fold1").rglob("*") if path.is_file()}
    driver = pclmix(*command, "--folds", "1-2")
    run = out / "fold2"
    wait_for(lambda: lines(run) > 60, driver)
    driver.kill()
    driver.wait()
    again = pclmix(*command, "--folds", "1-2")
    assert fewest_lines_until_done(run, again) >= 40
    finish(again)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert record(run)["from_step"] >= 40
    for fold in ("fold1", "fold2"):
        equal(out / fold, undisturbed / fold)


def test_study_resumes_after_ctrl_c(two_nodes: Any, pclmix: Start, phantom_dataset: Path, undisturbed: Path) -> None:
    out = two_nodes.shared / "ctrl-c"
    run = out / "fold1"
    command = ("crossval", phantom_dataset, "--out", out, "--folds", "1", *LONG, "--cluster", two_nodes.address)
    driver = pclmix(*command)
    wait_for(lambda: lines(run) > 30, driver)
    driver.send_signal(signal.SIGINT)
    finish(driver, 130)
    assert record(run)["status"] == "interrupted"
    saved = torch.load(run / "last.ckpt", weights_only=True)["step"]
    assert saved == lines(run), "the checkpoint is of the step at which it was told to stop"
    finish(pclmix(*command))
    equal(run, undisturbed / "fold1")


def test_a_run_that_fails_does_not_stop_the_others(two_nodes: Any, pclmix: Start, phantom_dataset: Path) -> None:
    out = two_nodes.shared / "fails"
    common = ("--folds", "1", "--method", "pce", "--recipe", "tiny", "--device", "cpu", "--iterations", "20")
    command = ("sweep", phantom_dataset, "optim.lr=0.01,1e11,0.02", "--out", out, *common)
    output = finish(pclmix(*command, "--cluster", two_nodes.address), 2)
    assert "1 of 3 runs failed" in output
    assert "lr=1e11, fold 1" in output
    states = [record(out / f"optim.lr={lr}" / "fold1")["status"] for lr in ("0.01", "1e11", "0.02")]
    assert states == ["finished", "failed", "finished"]
    failed = out / "optim.lr=1e11" / "fold1"
    assert record(failed)["reason"] in output
    assert record(failed)["reason"] in (failed / "console.log").read_text()
    shown = finish(pclmix("status", out))
    assert "2 finished" in shown
    assert "1 failed" in shown


class Evil:
    """A pickle that leaves a trace when it is loaded the unsafe way."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def test_nodes_load_with_weights_only(two_nodes: Any, pclmix: Start, phantom_dataset: Path) -> None:
    out, trace = two_nodes.shared / "evil", two_nodes.shared / "trace"
    run = out / "fold1"
    common = ("--folds", "1", "--method", "pce", "--recipe", "tiny", "--device", "cpu", "--iterations", "2")
    command = ("crossval", phantom_dataset, "--out", out, *common, "--cluster", two_nodes.address)
    finish(pclmix(*command))
    (run / "evaluation.json").unlink()
    (run / "previous.ckpt").unlink(missing_ok=True)
    with zipfile.ZipFile(run / "last.ckpt", "w") as archive:
        archive.writestr("last/data.pkl", pickle.dumps(Evil(trace)))
        archive.writestr("last/version", "3")
        archive.writestr("last/byteorder", "little")
    output = finish(pclmix(*command), 2)
    assert "last.ckpt" in output
    assert not trace.exists()
