"""Training and prediction as child processes, one at a time, with all state on disk.

Under DATASET/.pclmix: jobs/ID/request.json (written here), jobs/ID/outcome.json (written by the child),
jobs/ID/log.txt, and runs/ID, an ordinary run folder. The child holds a lock on jobs/lock while it lives, so that any
server, also one started later, knows whether a job is running.
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
from functools import cache
from pathlib import Path
from typing import Any, Literal

from filelock import lock_descriptor

from pclmix.config import recipe_names
from pclmix.errors import PclmixError, require_one_of
from pclmix.io.files import read_json, write_json
from pclmix.io.threads import thread_settings
from pclmix.web.results import read_yaml, training
from pclmix.web.workspace import UnknownError, Workspace

REQUEST, OUTCOME, LOG, STOP, PID = "request.json", "outcome.json", "log.txt", "stop", "pid"
_ID = re.compile(r"^\d{8}-\d{6}(?:-\d+)?$")
_TAIL = 4000  # bytes at the end of the log searched for the reason of a failure
_LOOKS = 3
Status = Literal["running", "stopping", "finished", "stopped", "failed"]


class BusyError(PclmixError):
    """Another job is running."""


#: In place of a recipe name: settings planned from the data.
PLAN = "plan"


class Jobs:
    """Start, watch and stop the jobs of a dataset."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._children: list[subprocess.Popen[bytes]] = []  # polled, so that ended children do not stay zombies
        self._looking = threading.Lock()

    def train(
        self, *, method: str, recipe: str, seconds: float | None, then: list[str], cases: list[str] | None = None
    ) -> str:
        """Start training on `cases` (default: all), then predict `then`. Returns the ID of the job and its run.

        With recipe PLAN the settings are planned from the data, and `seconds` includes preparation and finishing.
        """
        # Only names: a path would let a client read any .yaml file of this computer.
        require_one_of("recipe", recipe, [PLAN, *recipe_names()])
        require_one_of("method", method, [name for name, _ in scribble_methods()])
        job = self._new_id()
        asked = {"kind": "train", "method": method, "recipe": recipe, "seconds": seconds, "then": then, "run": job}
        return self._start(job, {**asked, "cases": cases, "resume": False})

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
        alive = self._alive()
        outcome = read_json(folder / OUTCOME) if (folder / OUTCOME).is_file() else {}
        status: Status = "running"
        if (folder / STOP).exists():
            status = "stopping" if alive else "stopped"
        elif not alive:
            status = "failed"
        if not alive:  # the child writes its outcome shortly before it exits
            status = outcome.get("status", status)
        message = outcome.get("message", "")
        if status == "failed" and not message:
            message = "it ended unexpectedly: " + (_last_line(folder / LOG) or "its log is empty")
        shown = {key: request.get(key) for key in ("kind", "method", "recipe", "seconds", "run", "started")}
        state = {"id": newest, "status": status, "message": message, **shown}
        state |= {"done": outcome.get("done", 0), "total": outcome.get("total", 0), "cases": outcome.get("cases", [])}
        phase = outcome.get("phase", "preparing") if alive else ""
        if request["kind"] == "train":
            since = float(request["started"]) if phase == "training" else None
            state |= training(self.workspace.internal("runs", str(request["run"])), since)
            state["resumable"] = status in ("stopped", "failed") and state["step"] > 0
            state["then"] = bool(request.get("then"))
            phase = state["phase"] or phase
        state["phase"] = phase or ("finishing" if alive else "")
        return state

    def runs(self) -> list[dict[str, Any]]:
        """Runs that can predict, newest first."""
        top = self.workspace.internal("runs")
        found = []
        for folder in sorted(top.iterdir(), reverse=True) if top.is_dir() else ():
            if _ID.match(folder.name) and (folder / "last.ckpt").is_file():
                about = read_json(folder / "run.json") if (folder / "run.json").is_file() else {}
                config = read_yaml(folder / "config.yaml")
                known = {"id": folder.name, "status": about.get("status"), "step": about.get("step", 0)}
                found.append({**known, "method": config.get("method"), "recipe": config.get("recipe")})
        return found

    def run_folder(self, run: str) -> Path:
        if not _ID.match(run) or not (self.workspace.internal("runs", run) / "last.ckpt").is_file():
            raise UnknownError(f"there is no trained model '{run[:40]}'; train one first")
        return self.workspace.internal("runs", run)

    def request(self, job: str) -> dict[str, Any]:
        if not _ID.match(job) or not (self._folder(job) / REQUEST).is_file():
            raise UnknownError(f"there is no job '{job[:40]}'")
        content: dict[str, Any] = read_json(self._folder(job) / REQUEST)
        return content

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
            self._children.append(child)
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

    def _alive(self) -> bool:
        """Whether a job is running, also one started by an earlier server."""
        self._children = [child for child in self._children if child.poll() is None]
        with self._looking:
            for _ in range(_LOOKS):  # another process may hold the lock briefly while checking
                handle = self._open_lock()
                try:
                    if lock_descriptor(handle, blocking=False):
                        return False
                finally:
                    os.close(handle)
                if self._children:
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


def _order(job: str) -> tuple[str, int]:
    parts = job.split("-")
    return "-".join(parts[:2]), int(parts[2]) if len(parts) > 2 else 1


def _last_line(path: Path) -> str:
    with suppress(OSError):
        lines = path.read_bytes()[-_TAIL:].decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else ""
    return ""
