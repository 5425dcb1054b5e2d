"""RUN/node.json: where a run runs, since when, and a sign of life every few seconds."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pclmix.errors import PclmixError
from pclmix.io.files import read_json, write_json
from pclmix.studies.plan import EVALUATION
from pclmix.training.log import read_metrics

NODE = "node.json"
BEAT = 5.0  #: seconds between signs of life
Status = Literal["running", "finished", "failed", "interrupted"]


@dataclass(frozen=True)
class Record:
    """One attempt at a run; `earlier` has the nodes and the ends of those before it."""

    status: Status
    node: str
    address: str  #: of the node in the cluster; empty without one
    device: str
    threads: int  #: of torch on the CPU: results on a CPU are equal bit for bit where this is, too
    pid: int
    started: float
    seen: float  #: seconds since the epoch, as `started`
    attempt: int = 1
    from_step: int = 0
    dataset: str = "read in place"  #: or carried to the node by Ray
    scored: bool = True  #: false where no test case has a dense mask
    reason: str = ""
    earlier: tuple[dict[str, Any], ...] = ()


def read_record(folder: Path) -> Record | None:
    """The record of a run folder, None where there is none that can be read."""
    try:
        content = read_json(folder / NODE)
        return Record(**{**content, "earlier": tuple(content["earlier"])})
    except (PclmixError, TypeError, KeyError):
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
    """The record of an attempt that begins here and now."""
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
    """Within, `seen` in RUN/node.json moves on, and `carry` is called as often."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT):
            with suppress(Exception):  # a full disk, a folder gone: the run itself meets and reports that
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
