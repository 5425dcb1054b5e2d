"""Progress of a study, read from its folder; works from any shell."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from pclmix.config import Config, build, planned_steps
from pclmix.errors import PclmixError
from pclmix.io.files import read_json
from pclmix.studies.plan import EVALUATION, Record, Run, Study, is_done, read_record
from pclmix.training.log import ENVIRONMENT, METRICS, read_config

SILENT = 60.0  #: seconds without a heartbeat after which a run no longer counts as running
ORDER = ("running", "silent", "failed", "interrupted", "finished", "waiting")
_COLOURS = {"running": "green", "silent": "yellow", "failed": "red", "interrupted": "yellow", "waiting": "dim"}


@dataclass(frozen=True)
class State:
    """State of one run."""

    run: Run
    status: str  #: one of ORDER
    node: str = ""
    step: int = 0
    share: float = 0.0  #: fraction of its steps or seconds
    left: float | None = None  #: seconds, if they can be estimated
    best: str = ""  #: Dice of a finished run, else the best validation recall or the lowest loss
    dice: float | None = None
    took: float | None = None  #: seconds of the last attempt of a finished run
    reason: str = ""


class Follower:
    """Follows the state of one run; reads only appended lines."""

    def __init__(self, study: Study, run: Run) -> None:
        self.run, self.folder = run, study.place(run)
        self._offset, self._step, self._round = 0, 0, 1
        self._lowest: dict[str, float] = {}
        self._budget: tuple[int, float | None] | None = None
        self._ended: State | None = None

    def state(self) -> State:
        if self._ended is not None:
            return self._ended
        record = read_record(self.folder)
        if is_done(self.folder):
            self._ended = self._finished(record)
            return self._ended
        if record is None:
            return State(self.run, "waiting")
        self._read_metrics()
        now = time.time()
        status = "silent" if record.status == "running" and now - record.seen > SILENT else record.status
        share = self._share(record)
        node = f"{record.node} {record.address}".strip()
        left = self._left(record, share) if status == "running" else None
        return State(self.run, status, node, self._step, share, left, self._best(), reason=record.reason)

    def _finished(self, record: Record | None) -> State:
        self._read_metrics()
        dice = None
        with suppress(PclmixError, KeyError, TypeError, ValueError):
            dice = float(read_json(self.folder / EVALUATION)["mean"]["Dice"])
        node = f"{record.node} {record.address}".strip() if record is not None else ""
        took = record.seen - record.started if record is not None else None
        best = "" if dice is None else f"Dice {100 * dice:.1f} %"
        return State(self.run, "finished", node, self._step, 1.0, None, best, dice, took)

    def _read_metrics(self) -> None:
        path = self.folder / METRICS
        with suppress(OSError):
            if path.stat().st_size < self._offset:  # truncated to the checkpoint by a resumed run
                self._offset, self._lowest = 0, {}
            with path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
            whole = added[: added.rfind(b"\n") + 1]
            self._offset += len(whole)
            for text in whole.splitlines():
                with suppress(ValueError, TypeError, KeyError, AttributeError):
                    self._note(json.loads(text))

    def _note(self, line: dict[str, float]) -> None:
        self._step = int(line["step"])
        if line.get("round", 1) != self._round:  # the loss differs
            self._round, self._lowest = int(line["round"]), {}
        for name, sign in (("loss", 1.0), ("validation/recall", -1.0)):
            if name in line:
                self._lowest[name] = min(self._lowest.get(name, float("inf")), sign * line[name])

    def _best(self) -> str:
        if "validation/recall" in self._lowest:
            return f"recall {-100 * self._lowest['validation/recall']:.1f} %"
        return f"loss {self._lowest['loss']:.3f}" if "loss" in self._lowest else ""

    def _share(self, record: Record) -> float:
        if self._budget is None:
            with suppress(PclmixError):
                content = read_config(self.folder)
                if content is not None:  # a run has its record before its configuration
                    config = build(Config, content, str(self.folder))
                    self._budget = (planned_steps(config.model_dump()), config.engine.seconds)
        if self._budget is None:
            return 0.0
        steps, seconds = self._budget
        if seconds is not None:
            return min(1.0, max(0.0, record.seen - self._training_since(record)) / seconds)
        return min(1.0, self._step / steps)

    def _left(self, record: Record, share: float) -> float | None:
        if self._budget is None:
            return None
        took = max(0.0, time.time() - self._training_since(record))
        if self._budget[1] is not None:
            return max(0.0, self._budget[1] - took)
        done = share - record.from_step / self._budget[0]
        return None if done <= 0 else (1 - share) * took / done

    def _training_since(self, record: Record) -> float:
        """An attempt first imports, reads the dataset and compiles; then, with its first steps, it writes this file."""
        try:
            return max(record.started, (self.folder / ENVIRONMENT).stat().st_mtime)
        except OSError:
            return record.started


def read_states(study: Study) -> list[State]:
    return [Follower(study, run).state() for run in study.runs]


def render(states: Sequence[State], title: str, rows: int | None = None) -> Table:
    """The table of a study; running runs come first, and at most `rows` are shown."""
    counts = Counter(state.status for state in states)
    said = ", ".join(f"{counts[status]} {status}" for status in ORDER if counts[status])
    caption = [f"{len(states)} runs: {said}"]
    scored = [state for state in states if state.dice is not None]
    if scored:
        best = max(scored, key=lambda state: state.dice or 0.0)
        caption.append(f"best so far: {escape(best.run.name)}, {best.best}")
    left = time_left(states)
    if left is not None:
        caption.append(f"about {duration(left)} left")
    table = Table(title=escape(title), caption="; ".join(caption), box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("run", "status", "node"):
        table.add_column(heading)
    for heading in ("step", "left"):
        table.add_column(heading, justify="right")
    table.add_column("best so far")
    shown = list(states) if rows is None else sorted(states, key=lambda state: ORDER.index(state.status))[:rows]
    for state in shown:
        colour = _COLOURS.get(state.status, "")
        status = f"[{colour}]{state.status}[/]" if colour else state.status
        step = f"{state.step} ({state.share:.0%})" if state.step else ""
        remaining = "" if state.left is None else duration(state.left)
        table.add_row(escape(state.run.name), status, escape(state.node), step, remaining, state.best)
    return table


def time_left(states: Sequence[State]) -> float | None:
    """Seconds until all runs are finished, if waiting ones take as long as finished ones."""
    took = [state.took for state in states if state.took]
    running = [state.left for state in states if state.left is not None]
    waiting = sum(state.status == "waiting" for state in states)
    if not running or (waiting and not took):
        return None
    return max(running) + (waiting * sum(took) / len(took) / len(running) if waiting else 0.0)


def duration(seconds: float) -> str:
    """`0:03:20`, `2 days, 1:00:00`."""
    return str(timedelta(seconds=round(seconds)))


class LiveTable:
    """A live table on a terminal, below the executor's lines; elsewhere the lines alone.

    The table reads files of every queued run and has all runs in it, and each printed line draws it again: lines wait
    for the next update.
    """

    EVERY = 1.0  #: seconds between updates, at least
    REST = 20  #: or so many times what an update took, which limits updates to 5 % of the time

    def __init__(self, study: Study, runs: Sequence[Run], console: Console) -> None:
        self.study, self.console = study, console
        self._followers = {run.folder: Follower(study, run) for run in runs}
        self._states = {run.folder: State(run, "waiting") for run in runs}
        self._lines: list[str] = []
        self._not_before = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self.flush()

    def say(self, line: str) -> None:
        self._lines.append(line)
        if self._live is None:
            self.flush()

    def flush(self) -> None:
        """Print the lines that wait."""
        if self._lines:
            self.console.print("\n".join(self._lines), highlight=False, markup=False, soft_wrap=True)
            self._lines.clear()

    def update(self, queued: Iterable[Run]) -> None:
        """Update, if it is time, runs that are or were `queued`; others cannot have changed."""
        began = time.monotonic()
        if self._live is None or began < self._not_before:
            return
        moving = {run.folder for run in queued}
        moving |= {folder for folder, state in self._states.items() if state.status in ("running", "silent")}
        self._states.update({folder: self._followers[folder].state() for folder in moving})
        rows = max(5, self.console.height - 8)
        table = render(list(self._states.values()), str(self.study.folder), rows)
        self._live.update(table, refresh=not self._lines)
        self.flush()
        spent = time.monotonic() - began
        self._not_before = began + max(self.EVERY, self.REST * spent)
