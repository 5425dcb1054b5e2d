"""A study on disk: STUDY/study.json lists its runs, RUN/node.json has the node and heartbeat of a run."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pclmix import __version__
from pclmix.errors import PclmixError, checked
from pclmix.inference.predictor import TTA
from pclmix.io.files import atomic_path, read_json, refuse_existing, require_writable, write_json
from pclmix.training.log import CONFIG, read_metrics

STUDY, README = "study.json", "README.txt"
NODE = "node.json"  #: in a run folder
EVALUATION, CASES, PREDICTIONS = "evaluation.json", "cases.csv", "predictions"
BEAT = 5.0  #: seconds between heartbeats
Status = Literal["running", "finished", "failed", "interrupted"]


@dataclass(frozen=True)
class Settings:
    """Settings that determine a run besides its data; a run continues only with the same ones."""

    method: str | None = None
    recipe: str = "fast"  #: never a separate plan per run, since runs are compared
    overrides: tuple[str, ...] = ()
    tta: TTA = "none"
    largest_component: bool = False


@dataclass(frozen=True)
class Run:
    """One training of a study with its predictions and scores. Runs are independent."""

    folder: str  #: relative to the study, with / as separator
    fold: int
    settings: Settings
    variant: str = ""  #: its row in the table; empty in a cross-validation

    @property
    def name(self) -> str:
        return f"{self.variant}, fold {self.fold}" if self.variant else f"fold {self.fold}"


@dataclass(frozen=True)
class Study:
    """Runs of one dataset in one folder."""

    folder: Path
    kind: str  #: the command line
    dataset: Path
    runs: tuple[Run, ...]
    id: str = ""
    command: str = ""
    started_in: str = ""  #: the working directory of the command

    def place(self, run: Run) -> Path:
        return self.folder / run.folder

    def earlier(self) -> Study | None:
        """The study that this one continues, None if it is new. Refuses a different one; writes nothing."""
        folder = self.folder
        if folder.is_file():
            raise PclmixError(f"{folder} is a file; --out is the folder for the runs")
        known = (folder / STUDY).is_file()
        if not known:
            refuse_existing(folder)
        require_writable(folder)
        earlier = read_study(folder) if known else None
        if earlier is not None:
            _require_same(earlier, self)
        return earlier

    def begin(self) -> Study:
        """Write study.json and README.txt; the runs of an earlier study in the folder are kept."""
        folder, earlier = self.folder, self.earlier()
        kept = {run.folder: run for run in (earlier.runs if earlier is not None else ())}
        kept.update({run.folder: run for run in self.runs})
        words = [Path(sys.argv[0]).name.replace("__main__.py", "pclmix"), *sys.argv[1:]]
        content = {
            "id": earlier.id if earlier is not None else uuid.uuid4().hex,
            "kind": self.kind,
            "folder": str(folder.resolve()),
            "dataset": str(self.dataset),
            "command": shlex.join(words),
            "started_in": str(Path.cwd()),
            "pclmix": __version__,
            "updated": datetime.now(UTC).isoformat(timespec="seconds"),
            "runs": {
                run.folder: {"variant": run.variant, "fold": run.fold, "settings": asdict(run.settings)}
                for run in kept.values()
            },
        }
        write_json(folder / STUDY, content)
        with atomic_path(marker(folder, str(content["id"]))):
            pass
        with atomic_path(folder / README) as temporary:
            temporary.write_text(_readme(content), encoding="utf-8")
        return read_study(folder)


def marker(folder: Path, study: str) -> Path:
    """An empty file named by a study's id: nodes look for it instead of reading study.json for each of its runs."""
    return folder / f".{study}"


def read_study(folder: Path) -> Study:
    """The study in a folder, as study.json has it."""
    path = Path(folder) / STUDY
    if not path.is_file():
        raise PclmixError(f"{path} does not exist; give the --out folder of crossval, ablate or sweep")
    content = read_json(path)
    try:
        runs = tuple({"folder": name, **entry} for name, entry in content["runs"].items())
        about = {key: content[key] for key in ("kind", "dataset", "id", "command", "started_in")}
    except (KeyError, TypeError, AttributeError) as error:
        raise PclmixError(
            f"{path} is damaged or of another version of pclmix ({error!r}); choose another --out"
        ) from error
    return checked(Study, {**about, "folder": Path(folder), "runs": runs}, path)


def _require_same(earlier: Study, now: Study) -> None:
    """Refuse to continue a run with other settings or another dataset."""
    for what, before, here in (("command", earlier.kind, now.kind), ("dataset", earlier.dataset, now.dataset)):
        if before != here:
            raise PclmixError(
                f"{now.folder} is a study of another {what} ({before} then, {here} now); choose another --out"
            )
    known = {run.folder: run for run in earlier.runs}
    for run in now.runs:
        before_, here_ = known.get(run.folder), asdict(run.settings)
        if before_ is None or not (now.place(run) / CONFIG).is_file():
            continue
        then = asdict(before_.settings)
        changed = [key for key in here_ if then[key] != here_[key]]
        if changed:
            shown = f"{changed[0]}: {_shown(then[changed[0]])} then, {_shown(here_[changed[0]])} now"
            raise PclmixError(
                f"{now.place(run)} was begun with other settings ({shown}); repeat them or choose another --out"
            )


def _shown(value: Any) -> str:
    return " ".join(value) or "none" if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def _readme(content: dict[str, Any]) -> str:
    return f"""A study of pclmix {content["pclmix"]}: {content["kind"]}, {len(content["runs"])} runs.
Dataset: {content["dataset"]}

To continue it, or to run what failed again, give the same command:

    cd {shlex.quote(content["started_in"])}
    {content["command"]}

To see how far it is:

    pclmix status {shlex.quote(content["folder"])}

study.json         the runs and their settings
RUN/               a run folder of `pclmix train`; RUN is a key of "runs" in study.json
RUN/node.json      where it ran: node, device, threads, attempts
RUN/console.log    what it printed, if it ran on a cluster
RUN/predictions/   label maps of the test cases
RUN/evaluation.json, RUN/cases.csv    their scores; a run that has them is not repeated
evaluation.json, cases.csv            the same over all folds (in each variant's folder where there are several)
comparison/        the table and figures over all variants, once every run is finished
"""


@dataclass(frozen=True)
class Record:
    """One attempt at a run; `earlier` has the nodes and end times of previous ones."""

    status: Status
    node: str
    address: str  #: of the node in the cluster; empty without one
    device: str
    threads: int  #: torch's CPU capability: CPU results are bit-identical if this is equal, too
    pid: int
    started: float
    seen: float  #: seconds since the epoch, as `started`
    attempt: int = 1
    from_step: int = 0
    dataset: str = "read in place"  #: or transferred to the node by Ray
    scored: bool = True  #: false where no test case has a dense mask
    reason: str = ""
    earlier: tuple[dict[str, Any], ...] = ()


def read_record(folder: Path) -> Record | None:
    """The record of a run folder; None if missing or unreadable."""
    try:
        return checked(Record, read_json(folder / NODE), folder / NODE)
    except PclmixError:
        return None


def write_record(folder: Path, record: Record) -> None:
    write_json(folder / NODE, asdict(record))


def is_done(folder: Path) -> bool:
    """Whether a run is trained, predicted and, where there are references, scored."""
    if (folder / EVALUATION).is_file():
        return True
    record = read_record(folder)
    return record is not None and record.status == "finished" and not record.scored


def new_record(folder: Path, *, device: str, threads: int, address: str = "", attempt: int = 1) -> Record:
    """The record of an attempt that starts now on this host."""
    before = read_record(folder)
    earlier: tuple[dict[str, Any], ...] = ()
    if before is not None:
        last = {"node": before.node, "address": before.address, "started": before.started, "seen": before.seen}
        earlier = (*before.earlier, {**last, "status": before.status, "reason": before.reason})
    lines = read_metrics(folder)
    now = time.time()
    return Record(
        "running",
        socket.gethostname(),
        address,
        device,
        threads,
        os.getpid(),
        now,
        now,
        attempt,
        int(lines[-1]["step"]) if lines else 0,
        earlier=earlier,
    )


@contextmanager
def beating(folder: Path, record: Record, carry: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, update `seen` in RUN/node.json and call `carry` periodically."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT):
            with suppress(Exception):  # a full disk or missing folder: the run itself reports it
                write_record(folder, replace(record, seen=time.time()))
                carry()

    thread = threading.Thread(target=beat, name="pclmix-beat", daemon=True)
    write_record(folder, record)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
