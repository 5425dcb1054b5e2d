"""Training and prediction as child processes, one at a time, with everything that is known of them on disk.

Under DATASET/.pclmix: jobs/ID/request.json (what was asked, written here), jobs/ID/outcome.json (how it ended, written
by the child), jobs/ID/log.txt, and runs/ID, an ordinary run folder. A child holds a lock on jobs/lock as long as it
lives; so any server, also one started later, knows whether a job runs.
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
from pclmix.web.runs import read_yaml, training
from pclmix.web.workspace import UnknownError, Workspace

REQUEST, OUTCOME, LOG, STOP, PID = "request.json", "outcome.json", "log.txt", "stop", "pid"
_ID = re.compile(r"^\d{8}-\d{6}(?:-\d+)?$")
_TAIL = 4000  # bytes of a log that may hold the reason of a failure
_LOOKS = 3
Status = Literal["running", "stopping", "finished", "stopped", "failed"]


class BusyError(PclmixError):
    """A job is running already."""


#: In place of a recipe's name: settings from the data.
PLAN = "plan"


class Jobs:
    """Start, watch and stop the jobs of a dataset."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._children: list[subprocess.Popen[bytes]] = []  # polled, so that those that ended do not stay as zombies
        self._looking = threading.Lock()

    def train(
        self, *, method: str, recipe: str, seconds: float | None, then: list[str], cases: list[str] | None = None
    ) -> str:
        """Start training on `cases`, by default all, then predict `then`; returns the job, and its run's name too.

        Recipe PLAN plans from the data; `seconds` are then those until the finished run.
        """
        # Names alone: a path would have any .yaml of this computer read and quoted.
        require_one_of("recipe", recipe, [PLAN, *recipe_names()])
        require_one_of("method", method, [name for name, _ in scribble_methods()])
        job = self._new_id()
        asked = {"kind": "train", "method": method, "recipe": recipe, "seconds": seconds, "then": then, "run": job}
        return self._start(job, {**asked, "cases": cases, "resume": False})

    def resume(self, job: str) -> str:
        """Go on with a training that was stopped or died, with the settings it was begun with."""
        before = self.request(job)
        if before["kind"] != "train":
            raise PclmixError("only a training can be resumed; predict again instead")
        return self._start(self._new_id(), {**before, "resume": True})

    def predict(self, run: str, cases: list[str]) -> str:
        """Predict cases with a trained run."""
        self.run_folder(run)
        return self._start(self._new_id(), {"kind": "predict", "run": run, "cases": cases})

    def stop(self) -> None:
        """Ask the running job to save and end; asked a second time, it is ended at once."""
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
        """What the page shows of the newest job, or None where there never was one."""
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
        if not alive:  # a child that has said how it went still takes a moment to end
            status = outcome.get("status", status)
        message = outcome.get("message", "")
        if status == "failed" and not message:
            message = "it ended unexpectedly: " + (_last_line(folder / LOG) or "nothing was said")
        shown = {key: request.get(key) for key in ("kind", "method", "recipe", "seconds", "run", "started")}
        state = {"id": newest, "status": status, "message": message, **shown}
        state |= {"done": outcome.get("done", 0), "total": outcome.get("total", 0), "cases": outcome.get("cases", [])}
        phase = outcome.get("phase", "preparing") if alive else ""
        if request["kind"] == "train":
            since = float(request["started"]) if phase == "training" else None
            state |= training(self.workspace.corner("runs", str(request["run"])), since)
            state["resumable"] = status in ("stopped", "failed") and state["step"] > 0
            state["then"] = bool(request.get("then"))
            phase = state["phase"] or phase
        state["phase"] = phase or ("finishing" if alive else "")
        return state

    def runs(self) -> list[dict[str, Any]]:
        """Runs that can predict, newest first."""
        top = self.workspace.corner("runs")
        found = []
        for folder in sorted(top.iterdir(), reverse=True) if top.is_dir() else ():
            if _ID.match(folder.name) and (folder / "last.ckpt").is_file():
                about = read_json(folder / "run.json") if (folder / "run.json").is_file() else {}
                config = read_yaml(folder / "config.yaml")
                known = {"id": folder.name, "status": about.get("status"), "step": about.get("step", 0)}
                found.append({**known, "method": config.get("method"), "recipe": config.get("recipe")})
        return found

    def run_folder(self, run: str) -> Path:
        if not _ID.match(run) or not (self.workspace.corner("runs", run) / "last.ckpt").is_file():
            raise UnknownError(f"there is no trained model '{run[:40]}'; train one first")
        return self.workspace.corner("runs", run)

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
                    pass_fds=(lock,),  # the child inherits the lock and holds it until it ends
                    start_new_session=True,  # Ctrl-C in the server's terminal is not for the job
                )
            (folder / PID).write_text(str(child.pid), encoding="utf-8")
            self._children.append(child)
        finally:
            os.close(lock)
        return job

    def _take_lock(self) -> int:
        """The lock that a job holds while it lives, as a file handle; refused while another job has it."""
        handle = self._open_lock()
        with self._looking:
            if lock_descriptor(handle, blocking=False):
                return handle
        os.close(handle)
        raise BusyError("a job is running already; wait for it or stop it first")

    def _alive(self) -> bool:
        """Whether a job runs, also one that an earlier server started."""
        self._children = [child for child in self._children if child.poll() is None]
        with self._looking:
            for _ in range(_LOOKS):  # another process that looks holds the lock for a moment
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
        path = self.workspace.corner("jobs", "lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    def _newest(self) -> str | None:
        top = self.workspace.corner("jobs")
        names = [p.name for p in top.iterdir() if _ID.match(p.name)] if top.is_dir() else []
        known = [name for name in names if (top / name / REQUEST).is_file()]
        return max(known, key=_order) if known else None

    def _folder(self, job: str) -> Path:
        return self.workspace.corner("jobs", job)

    def _new_id(self) -> str:
        now, number = time.strftime("%Y%m%d-%H%M%S"), 1
        name = now
        while self._folder(name).exists():
            number += 1
            name = f"{now}-{number}"
        return name


@cache
def scribble_methods() -> list[tuple[str, str]]:
    """Names and summaries of the methods that learn from strokes; imported on first use, for torch takes its time."""
    from pclmix.methods.base import METHODS, load_all

    load_all()
    return [(name, kind.summary) for name, kind in METHODS if kind.needs == "scribbles"]


def worker_environment() -> dict[str, str]:
    """OpenMP threads that wait instead of spinning: on a busy machine spinning ones stall each other for minutes."""
    return {**os.environ, **thread_settings()}


def _order(job: str) -> tuple[str, int]:
    parts = job.split("-")
    return "-".join(parts[:2]), int(parts[2]) if len(parts) > 2 else 1


def _last_line(path: Path) -> str:
    with suppress(OSError):
        lines = path.read_bytes()[-_TAIL:].decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else ""
    return ""
