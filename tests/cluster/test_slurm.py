"""The job script for Slurm, with programs in the place of srun and scontrol: two nodes of one CPU process each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Slurm runs on Linux")
SCRIPT = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"
#: Starts a task for each node as srun does, hands SIGTERM to all of them, ends the others when one fails.
SRUN = """#!{python}
import os, signal, subprocess, sys, time
words = sys.argv[1:]
while words[0].startswith("-"):
    assert words.pop(0) == "--kill-on-bad-exit=1"
tasks = [
    subprocess.Popen(words, env={{**os.environ, "SLURM_NODEID": str(k), "SLURM_PROCID": str(k)}}, cwd=os.getcwd())
    for k in range(int(os.environ["SLURM_NNODES"]))
]
signal.signal(signal.SIGTERM, lambda number, _: [task.send_signal(number) for task in tasks])
codes = [None] * len(tasks)
while None in codes:
    time.sleep(0.1)
    codes = [task.poll() for task in tasks]
    if any(codes):
        for task in tasks:
            task.terminate()
sys.exit(max(abs(code) for code in codes))
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[1-2]" ] && printf 'localhost\\nlocalhost\\n'
"""


@pytest.fixture
def sbatch(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """The job as Slurm would start it on two nodes."""
    started: list[subprocess.Popen[str]] = []
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def start(*arguments: object) -> subprocess.Popen[str]:
        given = {
            "SLURM_JOB_ID": str(os.getpid() * 7919 % 20000),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NNODES": "2",
            "PROCESSES_PER_NODE": "1",
            "SLURM_CPUS_PER_TASK": "1",
            "PYTHON": sys.executable,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PCLMIX_CACHE": str(tmp_path / "cache"),
        }
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        job = subprocess.Popen(
            ["bash", str(SCRIPT), *map(str, arguments)],
            cwd=tmp_path,
            env=env | given,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        started.append(job)
        return job

    yield start
    for job in started:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def finish(job: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = job.communicate(timeout=240)
    return job.returncode, output


def state(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "run.json").read_text())
    return content


def weights(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(run / "last.ckpt", weights_only=True)["method"]
    return found


COMMON = ("--recipe", "tiny", "--method", "pce", "--device", "cpu", "engine.iterations=3")


def test_two_nodes_train_one_run(
    sbatch: Callable[..., subprocess.Popen[str]], phantom_dataset: Path, tmp_path: Path
) -> None:
    code, output = finish(sbatch(phantom_dataset, "--out", tmp_path / "run", *COMMON))
    assert code == 0, output
    assert state(tmp_path / "run")["status"] == "finished"
    assert len(torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["random"]) == 2  # of each rank


@pytest.mark.slow
def test_two_nodes_equal_two_processes_of_one_node(
    sbatch: Callable[..., subprocess.Popen[str]], phantom_dataset: Path, tmp_path: Path
) -> None:
    code, output = finish(sbatch(phantom_dataset, "--out", tmp_path / "job", *COMMON))
    assert code == 0, output
    command = [sys.executable, "-m", "pclmix", "train", phantom_dataset, "--out", tmp_path / "node", *COMMON]
    subprocess.run([*map(str, command), "--devices", "2"], check=True, capture_output=True, timeout=240)
    one, other = weights(tmp_path / "job"), weights(tmp_path / "node")
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.slow
def test_a_job_at_its_time_limit_saves_and_the_next_one_continues(
    sbatch: Callable[..., subprocess.Popen[str]], phantom_dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    steps_asked = ("engine.iterations=60", "engine.log_every=1")
    command = (phantom_dataset, "--out", run, "--recipe", "tiny", "--method", "pce", "--device", "cpu", *steps_asked)
    job = sbatch(*command)
    until = time.monotonic() + 120
    while not (run / "metrics.jsonl").is_file() or len((run / "metrics.jsonl").read_bytes().splitlines()) < 5:
        assert job.poll() is None, finish(job)
        assert time.monotonic() < until
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    code, output = finish(job)
    assert code != 0
    assert state(run)["status"] == "interrupted", output
    saved = torch.load(run / "last.ckpt", weights_only=True)["step"]
    assert 5 <= saved < 60
    code, output = finish(sbatch(*command))
    assert code == 0, output
    assert state(run)["status"] == "finished"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 61))
    assert finish(sbatch(*command))[0] == 0  # a job after the end has nothing to do


@pytest.mark.slow
def test_invalid_input_ends_the_job(
    sbatch: Callable[..., subprocess.Popen[str]], phantom_dataset: Path, tmp_path: Path
) -> None:
    code, output = finish(sbatch(phantom_dataset, "--out", tmp_path / "run", "--recipe", "tiny", "engine.batch=3"))
    assert code != 0
    assert "engine.batch=3" in output
    assert not (tmp_path / "run").exists()
