"""Prediction of an archive on a cluster: cases stream through workers, several at a time each, in any order."""

from __future__ import annotations

import uuid
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pclmix.cluster import carry
from pclmix.cluster.engine import Cluster, ClusterOptions, LostError, Resources, connect
from pclmix.cluster.worker import THREADS, Model, Reply, Worker, content_key, content_of, model_files, size_of
from pclmix.errors import PclmixError
from pclmix.inference.files import Archive, Choices, Outcome, Progress
from pclmix.inference.inputs import Job

AHEAD = THREADS + 1  #: cases that a worker has at a time: those it works on and the next
ATTEMPTS = 3  #: at a case whose worker is lost each time


@dataclass
class _Case:
    """A case on its way: to be read by the worker or, if it cannot, sent with its content."""

    job: Job
    attempt: int = 1


@dataclass
class _Slot:
    """A worker and the cases that it has."""

    actor: Any
    waking: Any  #: a ref: until it answers, for want of room perhaps never, the worker gets no case; then None
    reads: bool = True  #: until it says that it cannot read INPUT
    flying: dict[Any, _Case] = field(default_factory=dict)

    def takes(self, case: _Case) -> bool:
        """A case that lost a worker flies alone: if it is to blame, no other is lost with it."""
        if self.waking is not None:
            return False
        if any(other.attempt > 1 for other in self.flying.values()):
            return False
        return not self.flying if case.attempt > 1 else len(self.flying) < AHEAD


def predict_on_cluster(
    model: Path,
    source: Path,
    out: Path,
    options: ClusterOptions,
    choices: Choices,
    *,
    fold: int | None = None,
    device: str = "auto",
    batch: int | None = None,
    net: str = "net",
    workers: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Predict INPUT into OUT as `predict_files` does, by workers that each hold the model.

    `workers` limits their number; by default there are as many as the cluster has room for. A worker reads and writes
    the driver's folders if it sees them; otherwise Ray carries images to it and label maps back.
    """
    assert options.address is not None
    model, source, out = Path(model).resolve(), Path(source).resolve(), Path(out).resolve()
    files = model_files(model)
    with connect(options.address) as cluster:
        cluster.require_ready()
        wanted = cluster.resources(options, device)
        room = sum(node.slots(wanted) for node in cluster.nodes())
        shelf = cluster.actor(carry.Shelf, files[0].parent, files, resources=Resources(0), node=cluster.here)
        sent = Model(
            model,
            content_key(files),
            tuple(path.name for path in files),
            shelf,
            "cuda" if wanted.gpus else "cpu",
            batch,
            net,
            wanted.cores,
        )
        token = f".pclmix-{uuid.uuid4().hex}"

        def start() -> _Slot:
            actor = cluster.actor(Worker, sent, choices, token, resources=wanted, threads=THREADS)
            return _Slot(actor, actor.about.remote())

        first = start()
        archive = Archive(cluster.get(first.waking), source, out, choices, fold)
        count = min(room, workers or room, len(archive.todo))
        slots = [first, *(start() for _ in range(1, count))]
        _Stream(cluster, archive, slots, token, progress).run()
        return archive.finish()


class _Stream:
    """The cases of an archive on their way through the workers."""

    def __init__(
        self, cluster: Cluster, archive: Archive, slots: list[_Slot], token: str, progress: Progress | None
    ) -> None:
        self.cluster, self.archive, self.slots, self.progress = cluster, archive, slots, progress
        self.token = archive.folder / token
        self.queue = deque(_Case(job) for job in archive.todo)
        self.done: set[str] = set()

    def run(self) -> None:
        archive = self.archive
        self._tell()
        if not self.queue:
            return
        try:
            archive.record.write()
            archive.folder.mkdir(parents=True, exist_ok=True)
            self.token.touch()
            while self.queue or any(slot.flying for slot in self.slots):
                self._fill()
                self._settle()
        finally:
            self.token.unlink(missing_ok=True)
            archive.tidy()
            archive.outcome.done += [job.case for job in archive.todo if job.case in self.done]
            self.done.clear()

    def _fill(self) -> None:
        """Give every worker cases, the one with the fewest first."""
        while self.queue:
            free = [slot for slot in self.slots if slot.takes(self.queue[0])]
            if not free:
                return
            self._send(min(free, key=lambda slot: len(slot.flying)), self.queue.popleft())

    def _send(self, slot: _Slot, case: _Case) -> None:
        try:
            content = None if slot.reads else content_of(case.job)
        except OSError as error:
            self._bad(case, f"cannot read {error.filename}: {error.strerror}")
            return
        sizes = tuple(size_of(image) for image in case.job.images)
        slot.flying[slot.actor.predict.remote(case.job, sizes, content)] = case

    def _settle(self) -> None:
        """Wait for a case or a worker, at most a second."""
        owners = {ref: slot for slot in self.slots for ref in (*slot.flying, slot.waking) if ref is not None}
        for ref in self.cluster.ready(list(owners), 1.0):
            slot = owners[ref]
            case = slot.flying.pop(ref, None)
            try:
                reply = self.cluster.get(ref)
            except LostError as error:
                slot.waking = slot.actor.about.remote()
                if case is not None:
                    self._lost(case, error)
                continue
            if case is None:
                slot.waking = None
            else:
                self._take(slot, case, reply)

    def _lost(self, case: _Case, error: LostError) -> None:
        if case.attempt == ATTEMPTS:
            self._bad(case, f"its worker was lost {ATTEMPTS} times, at last: {error}")
        else:
            self.queue.appendleft(_Case(case.job, case.attempt + 1))

    def _take(self, slot: _Slot, case: _Case, reply: Reply) -> None:
        if reply.needs_content:
            slot.reads = False
            self.queue.appendleft(case)
            return
        if not reply.error and reply.files is not None:
            try:
                carry.write_files(self.archive.folder, reply.files)
            except PclmixError as error:
                self._bad(case, str(error))
                return
        if reply.error:
            self._bad(case, reply.error)
            return
        self.done.add(case.job.case)
        self._tell()

    def _bad(self, case: _Case, reason: str) -> None:
        self.archive.outcome.bad[case.job.case] = reason
        self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self.archive.settled + len(self.done), len(self.archive.jobs))
