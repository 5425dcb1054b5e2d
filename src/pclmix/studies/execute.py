"""Executors of a study's runs: one after the other in this process, or as tasks on the nodes of a cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pclmix.cluster import carry
from pclmix.cluster.engine import Cluster, ClusterOptions, LostError, Resources, connect
from pclmix.config import load_config
from pclmix.errors import PclmixError
from pclmix.io.files import sweep_leftovers
from pclmix.studies.plan import Run, Study, is_done
from pclmix.studies.status import LiveTable
from pclmix.studies.work import LOG, Order, Places, on_node, perform

ATTEMPTS = 4  #: at a run whose worker or node is lost each time
STOP_SECONDS = 120.0  #: for runs that were told to save and stop
QUEUED = 256  #: tasks that Ray holds at a time, at least; the rest wait here


@dataclass(frozen=True)
class Devices:
    """What each run trains on."""

    device: str = "auto"
    count: int = 1


ANY = Devices()


def execute(
    study: Study, runs: Sequence[Run], devices: Devices, options: ClusterOptions, console: Console
) -> dict[str, str]:
    """Do the runs that are not done; the reasons of those that failed, by name. KeyboardInterrupt when stopped.

    The study is written when nothing is left to refuse: a cluster that does not answer leaves no folder behind.
    """
    study.earlier()
    todo = []
    for folder in (study.folder, *map(study.place, runs)):
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
    _require_absolute(todo)
    with connect(options.address) as cluster:
        return _OnCluster(study, devices, options, cluster, console).execute(todo)


def _in_turn(
    study: Study, runs: Sequence[Run], devices: Devices, options: ClusterOptions, console: Console
) -> dict[str, str]:
    failed = {}
    for run in runs:
        console.rule(run.name)
        order = Order(study, run, devices.device, devices.count, options.cores)
        record = perform(order, Places(study.dataset, order.folder), console)
        if record.status == "interrupted":
            _say(console, "stopped and saved; the same command goes on")
            raise KeyboardInterrupt
        if record.status == "failed":
            failed[run.name] = record.reason
            _say(console, f"{run.name} failed: {record.reason}")
    return failed


class _OnCluster:
    """Runs as tasks. One that loses its worker is queued again and resumes from the last checkpoint."""

    def __init__(
        self, study: Study, devices: Devices, options: ClusterOptions, cluster: Cluster, console: Console
    ) -> None:
        self.study, self.cluster, self.console = study, cluster, console
        self.resources = cluster.resources(options, devices.device, devices.count)
        self.device = "cuda" if self.resources.gpus else "cpu"
        self.count = devices.count
        self.key = carry.fingerprint(study.dataset)

    def execute(self, runs: Sequence[Run]) -> dict[str, str]:
        self.cluster.require_ready(_files_of(runs))
        self.study = self.study.begin()
        nodes = self.cluster.nodes()
        slots = sum(node.slots(self.resources) for node in nodes)
        where = f"{len(nodes)} node(s) of the cluster at {self.cluster.address}"
        self._say(f"{len(runs)} runs on {where}, {slots} at a time, {self.resources} each")
        # On the node of this process, whose folders it reads and writes for nodes that cannot.
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
                        reason = self._settle(ref, run, attempt, queue)
                        if reason:
                            failed[run.name] = reason
                    table.update({run for run, _ in flying.values()})
            except (KeyboardInterrupt, SystemExit):
                self._stop(list(flying))
                raise
        return failed

    def _submit(self, run: Run, attempt: int, depot: Any) -> Any:
        order = Order(self.study, run, self.device, self.count, self.resources.cores, attempt)
        return self.cluster.submit(on_node, order, self.key, depot, resources=self.resources, name=run.folder)

    def _settle(self, ref: Any, run: Run, attempt: int, queue: deque[tuple[Run, int]]) -> str:
        """What became of a task that has ended: the reason where it failed for good."""
        try:
            record = self.cluster.get(ref)
        except LostError as error:
            if attempt == ATTEMPTS:
                self._say(f"{run.name} failed: its worker was lost {attempt} times")
                return f"its worker was lost {attempt} times, at last: {error}"
            self._say(f"{run.name}: its worker was lost ({error}); it goes on elsewhere")
            queue.appendleft((run, attempt + 1))
            return ""
        except Exception as error:  # the node could not even begin; the other runs go on
            self._say(f"{run.name} failed: {error}")
            return str(error) or type(error).__name__
        if record.status == "failed":
            self._say(f"{run.name} failed on {record.node} ({record.address}): {record.reason}")
            return f"{record.reason} (on {record.node}, output in {self.study.place(run) / LOG})"
        self._say(f"{run.name}: {record.status} on {record.node} ({record.address})")
        return ""

    def _stop(self, flying: list[Any]) -> None:
        self._say("stopping: runs save a checkpoint first")
        for ref in flying:
            self.cluster.cancel(ref)
        while flying and (ended := self.cluster.ready(flying, STOP_SECONDS)):
            flying = [ref for ref in flying if ref not in ended]
        self._say("stopped and saved; the same command goes on")

    def _say(self, text: str) -> None:
        _say(self.console, text)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _files_of(runs: Sequence[Run]) -> list[Path]:
    """Files besides the dataset that runs read: recipes of the user's, weights to start from."""
    found = set()
    for settings in {run.settings for run in runs}:
        recipe, weights = (
            settings.recipe,
            load_config(settings.recipe, settings.method, settings.overrides).encoder.weights,
        )
        found |= {recipe} if recipe.endswith((".yaml", ".yml")) else set()
        found |= {weights} if weights not in ("none", "imagenet") else set()
    return [Path(name) for name in sorted(found)]


def _require_absolute(runs: Sequence[Run]) -> None:
    for path in _files_of(runs):
        if not path.is_absolute():
            raise PclmixError(f"{path}: with --cluster write the whole path; nodes have other working folders")
