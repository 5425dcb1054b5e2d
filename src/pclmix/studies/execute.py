"""Executors of a study's runs: sequentially in this process, or as tasks on a cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from pclmix.cluster import carry
from pclmix.cluster.engine import Cluster, ClusterOptions, LostError, Resources, connect
from pclmix.config import load_config
from pclmix.errors import PclmixError
from pclmix.io.files import sweep_leftovers
from pclmix.studies.plan import PREDICTIONS, Run, Study, is_done
from pclmix.studies.status import LiveTable
from pclmix.studies.work import LOG, Order, Places, on_node, perform

ATTEMPTS = 4  #: attempts at a run whose worker or node is lost
STOP_SECONDS = 120.0  #: seconds for runs to save and stop
QUEUED = 256  #: minimum number of tasks queued in Ray


@dataclass(frozen=True)
class Devices:
    """Devices of each run."""

    device: str = "auto"
    count: int = 1


ANY = Devices()


def execute(
    study: Study, runs: Sequence[Run], devices: Devices, options: ClusterOptions, console: Console
) -> dict[str, str]:
    """Execute the unfinished runs; returns error messages by run name. Raises KeyboardInterrupt when stopped.

    The study is written after all checks: an unreachable cluster leaves no folder.
    """
    study.earlier()
    todo = []
    places = [study.place(run) for run in runs]
    for folder in (study.folder, *places, *(place / PREDICTIONS for place in places)):
        sweep_leftovers(folder)
    for run in runs:
        if is_done(study.place(run)):
            _say(console, f"{run.name} is done already")
        else:
            todo.append(run)
    if not todo:
        study.begin()
        return {}
    if options.address is None:
        return _in_turn(study.begin(), todo, devices, options, console)
    files = _files_of(todo)
    _require_absolute(files)
    with connect(options.address) as cluster:
        return _OnCluster(study, devices, options, cluster, console).execute(todo, files)


def _in_turn(
    study: Study, runs: Sequence[Run], devices: Devices, options: ClusterOptions, console: Console
) -> dict[str, str]:
    failed = {}
    for run in runs:
        console.rule(escape(run.name))
        order = Order(study, run, devices.device, devices.count, options.cores)
        record = perform(order, Places(study.dataset, order.folder), console)
        if record.status == "interrupted":
            _say(console, "stopped and saved; the same command continues")
            raise KeyboardInterrupt
        if record.status == "failed":
            failed[run.name] = record.reason
            _say(console, f"{run.name} failed: {record.reason}")
    return failed


class _OnCluster:
    """Executes runs as tasks. A run whose worker is lost is queued again and resumes from its last checkpoint."""

    def __init__(
        self, study: Study, devices: Devices, options: ClusterOptions, cluster: Cluster, console: Console
    ) -> None:
        self.study, self.cluster, self.console = study, cluster, console
        self.resources = cluster.resources(options, devices.device, devices.count)
        self.device = "cuda" if self.resources.gpus else "cpu"
        self.count = devices.count
        self.key = carry.fingerprint(study.dataset)

    def execute(self, runs: Sequence[Run], files: Sequence[Path]) -> dict[str, str]:
        """`files` are those that the runs read besides the dataset."""
        self.cluster.require_ready(files)
        self.study = self.study.begin()
        nodes = self.cluster.nodes()
        slots = sum(node.slots(self.resources) for node in nodes)
        where = f"{len(nodes)} node(s) of the cluster at {self.cluster.address}"
        self._say(f"{len(runs)} runs on {where}, {slots} at a time, {self.resources} each")
        # On the driver's node: it reads and writes folders for nodes without access.
        depot = self.cluster.actor(
            carry.Depot, self.study.dataset, self.study.folder, resources=Resources(0), node=self.cluster.here
        )
        queue = deque((run, 1) for run in runs)
        flying: dict[Any, tuple[Run, int]] = {}
        failed: dict[str, str] = {}
        with LiveTable(self.study, runs, self.console) as table:
            try:
                while queue or flying:
                    while queue and len(flying) < max(QUEUED, 2 * slots):
                        run, attempt = queue.popleft()
                        flying[self._submit(run, attempt, depot)] = (run, attempt)
                    for ref in self.cluster.ready(list(flying), table.EVERY):
                        run, attempt = flying.pop(ref)
                        reason, said = self._settle(ref, run, attempt, queue)
                        table.say(said)
                        if reason:
                            failed[run.name] = reason
                    table.update(run for run, _ in flying.values())
            except (KeyboardInterrupt, SystemExit):
                table.flush()
                self._stop(list(flying))
                raise
        return failed

    def _submit(self, run: Run, attempt: int, depot: Any) -> Any:
        study = replace(self.study, runs=())  # every task is sent the whole order: with thousands of runs, megabytes
        order = Order(study, run, self.device, self.count, self.resources.cores, attempt)
        return self.cluster.submit(on_node, order, self.key, depot, resources=self.resources, name=run.folder)

    def _settle(self, ref: Any, run: Run, attempt: int, queue: deque[tuple[Run, int]]) -> tuple[str, str]:
        """Handle an ended task; returns the error if it is not retried, and what to say."""
        try:
            record = self.cluster.get(ref)
        except LostError as error:
            if attempt == ATTEMPTS:
                reason = f"its worker was lost {attempt} times, at last: {error}"
                return reason, f"{run.name} failed: its worker was lost {attempt} times"
            queue.appendleft((run, attempt + 1))
            return "", f"{run.name}: its worker was lost ({error}); it is queued again"
        except Exception as error:  # the node could not start the run; other runs continue
            return str(error) or type(error).__name__, f"{run.name} failed: {error}"
        where = f"{record.node} ({record.address})"
        if record.status == "failed":
            reason = f"{record.reason} (on {record.node}, output in {self.study.place(run) / LOG})"
            return reason, f"{run.name} failed on {where}: {record.reason}"
        return "", f"{run.name}: {record.status} on {where}"

    def _stop(self, flying: list[Any]) -> None:
        self._say("stopping: runs save a checkpoint first")
        for ref in flying:
            self.cluster.cancel(ref)
        while flying and (ended := self.cluster.ready(flying, STOP_SECONDS)):
            flying = [ref for ref in flying if ref not in ended]
        self._say("stopped and saved; the same command continues")

    def _say(self, text: str) -> None:
        _say(self.console, text)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _files_of(runs: Sequence[Run]) -> list[Path]:
    """Files besides the dataset that runs read: recipe files and initial weights."""
    found = set()
    for settings in {run.settings for run in runs}:
        recipe, weights = (
            settings.recipe,
            load_config(settings.recipe, settings.method, settings.overrides).encoder.weights,
        )
        found |= {recipe} if recipe.endswith((".yaml", ".yml")) else set()
        found |= {weights} if weights not in ("none", "imagenet") else set()
    return [Path(name) for name in sorted(found)]


def _require_absolute(files: Sequence[Path]) -> None:
    for path in files:
        if not path.is_absolute():
            raise PclmixError(f"{path}: with --cluster write the whole path; nodes have other working folders")
