"""Training and prediction as child processes, one at a time, with all state on disk.

A child runs `python -m pclmix.web.worker DATASET JOB` and writes the outcome.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import lock_descriptor
from pydantic import Field, FiniteFloat

from pclmix.config import recipe_names
from pclmix.errors import PclmixError, checked, require_one_of
from pclmix.io.files import read_json, write_json
from pclmix.io.threads import thread_settings
from pclmix.web.workspace import (
    UnknownError,
    Workspace,
    is_denied,
    read_config,
    read_progress,
    training,
)

REQUEST, OUTCOME, LOG, STOP, PID = "request.json", "outcome.json", "log.txt", "stop", "pid"
_ID = re.compile(r"^\d{8}-\d{6}(?:-\d+)?$")
FULL = 74  #: exit code of a job that could not write its outcome, because the disk is full
_TAIL = 4000  # bytes at the end of the log searched for the reason of a failure
_LOOKS = 3
Status = Literal["running", "stopping", "finished", "stopped", "failed"]


class BusyError(PclmixError):
    """Another job is running."""


#: In place of a recipe name: settings planned from the data.
PLAN = "plan"


@dataclass(frozen=True)
class Request:
    """request.json of a job."""

    kind: Literal["train", "predict"]
    run: Annotated[str, Field(pattern=_ID)]
    started: FiniteFloat  #: seconds since the epoch
    method: str | None = None
    recipe: str | None = None
    seconds: FiniteFloat | None = None
    then: list[str] = field(default_factory=list)
    cases: list[str] | None = None
    resume: bool = False
    start: Annotated[str, Field(pattern=_ID)] | None = None  #: run whose weights the training starts from


@dataclass(frozen=True)
class Outcome:
    """outcome.json of a job."""

    status: Status | None = None
    message: str = ""
    phase: str = "preparing"
    done: int = 0
    total: int = 0
    cases: list[str] = field(default_factory=list)


class Jobs:
    """Start, watch and stop the jobs of a dataset."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._children: dict[str, subprocess.Popen[bytes]] = {}  # polled, so that ended children do not stay zombies
        self._looking = threading.Lock()

    def train(
        self,
        *,
        method: str,
        recipe: str,
        seconds: float | None,
        then: list[str],
        cases: list[str] | None = None,
        warm: bool = False,
    ) -> str:
        """Start training on `cases` (default: all), then predict `then`. Returns the ID of the job and its run.

        With recipe PLAN the settings are planned from the data, and `seconds` includes preparation and finishing. With
        `warm` training starts from the weights of `last_model`, if there is one.
        """
        # Only names: a path would let a client read any .yaml file of this computer.
        require_one_of("recipe", recipe, [PLAN, *recipe_names()])
        require_one_of("method", method, [name for name, _ in scribble_methods()])
        job = self._new_id()
        asked = {"kind": "train", "method": method, "recipe": recipe, "seconds": seconds, "then": then, "run": job}
        start = self.last_model(method, recipe) if warm else None
        return self._start(job, {**asked, "cases": cases, "resume": False, "start": start})

    def resume(self, job: str) -> str:
        """Resume a stopped or crashed training with its original settings."""
        before = self.request(job)
        if before["kind"] != "train":
            raise PclmixError("only a training can be resumed; predict again instead")
        return self._start(self._new_id(), {**before, "resume": True})

    def predict(self, run: str, cases: list[str]) -> str:
        """Start predicting cases with a trained run."""
        self.run_folder(run)
        return self._start(self._new_id(), {"kind": "predict", "run": run, "cases": cases})

    def stop(self) -> None:
        """Ask the running job to save and exit; the second call kills it."""
        state = self.state()
        if state is None or state["status"] not in ("running", "stopping"):
            raise PclmixError("no job is running")
        folder = self._folder(state["id"])
        again = (folder / STOP).exists()
        (folder / STOP).touch()
        with suppress(OSError, ValueError):
            pid = int((folder / PID).read_text(encoding="utf-8"))
            if again:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGINT)

    def state(self) -> dict[str, Any] | None:
        """State of the newest job for the page, or None if there is none."""
        newest = self._newest()
        if newest is None:
            return None
        request = self.request(newest)
        folder = self._folder(newest)
        alive = self.is_running()
        outcome = _read_outcome(folder / OUTCOME)
        status: Status = "running"
        if (folder / STOP).exists():
            status = "stopping" if alive else "stopped"
        elif not alive:
            status = "failed"
        if not alive:  # the child writes its outcome shortly before it exits
            status = outcome.status or status
        message = outcome.message
        if status == "failed" and not message:
            message = self._reason(newest)
        shown = {key: request.get(key) for key in ("kind", "method", "recipe", "seconds", "run", "started", "start")}
        state: dict[str, Any] = {"id": newest, "status": status, "message": message, **shown}
        state |= {"done": outcome.done, "total": outcome.total, "cases": outcome.cases}
        phase = outcome.phase if alive else ""
        if request["kind"] == "train":
            since = float(request["started"]) if phase == "training" else None
            state |= training(self.workspace.internal("runs", str(request["run"])), since)
            state["resumable"] = status in ("stopped", "failed") and state["step"] > 0
            state["then"] = bool(request.get("then"))
            phase = state["phase"] or phase
        state["phase"] = phase or ("finishing" if alive else "")
        return state

    def _reason(self, job: str) -> str:
        """Why a job ended that could not write its outcome."""
        child = self._children.get(job)
        if child is not None and child.returncode == FULL:
            return "the disk is full; free some space, then train again"
        return "it ended unexpectedly: " + (_last_line(self._folder(job) / LOG) or "its log is empty")

    def runs(self) -> list[dict[str, Any]]:
        """Runs that can predict, newest first."""
        top = self.workspace.internal("runs")
        found = []
        for folder in sorted(top.iterdir(), reverse=True) if top.is_dir() else ():
            if _ID.match(folder.name) and (folder / "last.ckpt").is_file():
                about, config = read_progress(folder), read_config(folder)
                chosen = {key: None if config is None else getattr(config, key) for key in ("method", "recipe")}
                found.append({"id": folder.name, "status": about.status, "step": about.step, **chosen})
        return found

    def last_model(self, method: str, recipe: str) -> str | None:
        """The newest finished run of this method and recipe, whose networks and settings a new one shares."""
        same = {"method": method, "recipe": recipe, "status": "finished"}
        return next((str(run["id"]) for run in self.runs() if all(run[key] == same[key] for key in same)), None)

    def run_folder(self, run: str) -> Path:
        if not _ID.match(run) or not (self.workspace.internal("runs", run) / "last.ckpt").is_file():
            raise UnknownError(f"there is no trained model '{run[:40]}'; train one first")
        return self.workspace.internal("runs", run)

    def request(self, job: str) -> dict[str, Any]:
        if not _ID.match(job) or not (self._folder(job) / REQUEST).is_file():
            raise UnknownError(f"there is no job '{job[:40]}'")
        path = self._folder(job) / REQUEST
        return asdict(checked(Request, read_json(path), path))

    def _start(self, job: str, request: dict[str, Any]) -> str:
        lock = self._take_lock()
        try:
            self.workspace.complete()
            folder = self._folder(job)
            folder.mkdir(parents=True)
            write_json(folder / REQUEST, {**request, "started": time.time()})
            with (folder / LOG).open("wb") as log:
                child = subprocess.Popen(
                    [sys.executable, "-m", "pclmix.web.worker", str(self.workspace.root), job],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=worker_environment(),
                    pass_fds=(lock,),  # the child inherits the lock and holds it until it exits
                    start_new_session=True,  # Ctrl-C in the terminal of the server must not reach the job
                )
            (folder / PID).write_text(str(child.pid), encoding="utf-8")
            self._children[job] = child
        finally:
            os.close(lock)
        return job

    def _take_lock(self) -> int:
        """The lock of a running job as a file descriptor; raises BusyError while another job holds it."""
        handle = self._open_lock()
        with self._looking:
            if lock_descriptor(handle, blocking=False):
                return handle
        os.close(handle)
        raise BusyError("another job is running; wait for it or stop it first")

    def is_running(self) -> bool:
        """Whether a job is running, also one started by an earlier server."""
        mine = [child for child in self._children.values() if child.poll() is None]
        with self._looking:
            for _ in range(_LOOKS):  # another process may hold the lock briefly while checking
                try:
                    handle = self._open_lock()
                except OSError as error:
                    if is_denied(error):
                        return False  # a read-only dataset, in which no job can write
                    raise
                try:
                    if lock_descriptor(handle, blocking=False):
                        return False
                finally:
                    os.close(handle)
                if mine:
                    return True
                time.sleep(0.01)
        return True

    def _open_lock(self) -> int:
        path = self.workspace.internal("jobs", "lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    def _newest(self) -> str | None:
        top = self.workspace.internal("jobs")
        names = [p.name for p in top.iterdir() if _ID.match(p.name)] if top.is_dir() else []
        known = [name for name in names if (top / name / REQUEST).is_file()]
        return max(known, key=_order) if known else None

    def _folder(self, job: str) -> Path:
        return self.workspace.internal("jobs", job)

    def _new_id(self) -> str:
        now, number = time.strftime("%Y%m%d-%H%M%S"), 1
        name = now
        while self._folder(name).exists():
            number += 1
            name = f"{now}-{number}"
        return name


@cache
def scribble_methods() -> list[tuple[str, str]]:
    """Names and summaries of the methods that learn from strokes. Imports torch on first use."""
    from pclmix.methods.base import METHODS, load_all

    load_all()
    return [(name, kind.summary) for name, kind in METHODS if kind.needs == "scribbles"]


def worker_environment() -> dict[str, str]:
    """Environment with passive OpenMP threads: spinning threads stall each other on a busy machine."""
    return {**os.environ, **thread_settings()}


def _read_outcome(path: Path) -> Outcome:
    """The outcome so far; the defaults if there is none or it is damaged."""
    with suppress(PclmixError):
        return checked(Outcome, read_json(path), path)
    return Outcome()


def _order(job: str) -> tuple[str, int]:
    parts = job.split("-")
    return "-".join(parts[:2]), int(parts[2]) if len(parts) > 2 else 1


def _last_line(path: Path) -> str:
    with suppress(OSError):
        lines = path.read_bytes()[-_TAIL:].decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else ""
    return ""
