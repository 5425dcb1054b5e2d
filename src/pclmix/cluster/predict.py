"""Prediction of an archive on a cluster: cases stream through workers, several at a time each, in any order."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import uuid
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pclmix.cluster import carry
from pclmix.cluster.engine import Cluster, ClusterOptions, LostError, Resources, connect
from pclmix.errors import PclmixError
from pclmix.inference import load
from pclmix.inference.files import Archive, CaseWork, Choices, Outcome, Progress
from pclmix.inference.inputs import Job
from pclmix.inference.predictor import About
from pclmix.io.volume import stem_of

log = logging.getLogger(__name__)
WAIT = 60.0  #: seconds for the first worker to start, after which a message says what it may wait for
THREADS = 3  #: concurrent calls of a worker: one reads, one predicts, one writes


@dataclass(frozen=True)
class Model:
    """The driver's model: its path, its files, a hash of their content, and the name of the shelf that serves them."""

    path: Path
    key: str
    names: tuple[str, ...]
    shelf: str  #: used only by nodes without the model
    device: str = "cpu"
    batch: int | None = None
    net: str = "net"
    cores: int = 1


@dataclass(frozen=True)
class Reply:
    """The outcome of a case; `files` are the files written, if the worker does not see OUT."""

    error: str = ""
    needs_content: bool = False  #: the worker cannot read the images: send the case again with their content
    files: carry.Files | None = None


def model_files(path: Path) -> list[Path]:
    """The files that a model consists of: the checkpoint with its calibration, or an exported file."""
    if not path.exists():
        raise PclmixError(f"{path} does not exist; MODEL is a run folder, a checkpoint or an exported .onnx file")
    if path.suffix.lower() == ".onnx":
        return [path]
    from pclmix.inference.torch import CALIBRATION
    from pclmix.training.checkpoint import find_checkpoint

    checkpoint = find_checkpoint(path)
    calibration = checkpoint.parent / CALIBRATION
    return [checkpoint, *([calibration] if calibration.is_file() else [])]


def content_key(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def size_of(image: Path) -> int:
    """Bytes of an image, or of all files of a DICOM series; -1 if unreadable."""
    try:
        if image.is_dir():
            return sum(path.stat().st_size for path in image.iterdir() if path.is_file())
        return image.stat().st_size if os.access(image, os.R_OK) else -1
    except OSError:
        return -1


def content_of(job: Job) -> list[carry.Files]:
    """For each image its files: itself and the spacing beside a picture, or a whole series."""
    found = []
    for image in job.images:
        sidecar = image.with_name(f"{stem_of(image)}.json")
        paths = sorted(image.iterdir()) if image.is_dir() else [image, sidecar]
        found.append({path.name: path.read_bytes() for path in paths if path.is_file()})
    return found


class Worker:
    """Holds one predictor. Ray calls `predict` in several threads."""

    def __init__(self, model: Model, choices: Choices, token: str) -> None:
        """`token` is the name of a file in OUT: a worker that sees it writes there, others return their files."""
        self.model, self.choices, self.token = model, choices, token
        self._work: CaseWork | None = None
        self._loading, self._network = threading.Lock(), threading.Lock()

    def about(self) -> About:
        """The model's description, with the driver's path."""
        return replace(self._ready().predictor.about, source=str(self.model.path))

    def predict(self, job: Job, sizes: tuple[int, ...], content: list[carry.Files] | None) -> Reply:
        """Predict one case and write it, or return what was written."""
        seen = all(size_of(image) == size for image, size in zip(job.images, sizes, strict=True))
        if not seen and content is None:
            return Reply(needs_content=True)
        writes = (job.out.parent / self.token).is_file() and os.access(job.out.parent, os.W_OK)
        if seen and writes:
            return Reply(error=self._do(job, job))
        with TemporaryDirectory(prefix="pclmix-") as name:
            scratch = Path(name)
            images = job.images
            if not seen and content is not None:
                images = tuple(
                    _put(scratch / f"in{k}", image, files)
                    for k, (image, files) in enumerate(zip(images, content, strict=True))
                )
            out = job.out if writes else scratch / "out" / job.out.name
            error = self._do(replace(job, images=images, out=out), job)
            if writes or error:
                return Reply(error=error)
            found = sorted(
                (path for path in out.parent.rglob("*") if path.is_file()), key=lambda path: (path == out, str(path))
            )
            return Reply(files={str(path.relative_to(out.parent)): path.read_bytes() for path in found})

    def _do(self, job: Job, asked: Job) -> str:
        """Read, predict and write a case; returns an error in terms of the driver's paths, or an empty string."""
        work = self._ready()
        try:
            case = work.read(job)
            with self._network:
                found = work.predict(case)
            work.write(job, found)
        except PclmixError as error:
            text = str(error)
            for here, there in ((job.out, asked.out), *zip(job.images, asked.images, strict=True)):
                text = text.replace(str(here), str(there))
            return text
        return ""

    def _ready(self) -> CaseWork:
        with self._loading:
            if self._work is None:
                self._work = CaseWork(self._load(), self.choices)
            return self._work

    def _load(self) -> Any:
        model = self.model
        single = model.names[0] == model.path.name  # a file, not a run folder
        root = model.path.parent if single else model.path
        try:
            here = content_key([root / name for name in model.names]) == model.key
        except OSError:
            here = False
        path = model.path
        if not here:
            import ray

            folder = carry.unpack(root.name, model.key, lambda: carry.take(ray.get_actor(model.shelf)))
            path = folder / model.path.name if single else folder
        if model.path.suffix.lower() != ".onnx":
            import torch

            torch.set_num_threads(model.cores)
        try:
            return load(path, device=model.device, batch=model.batch, net=model.net)
        except PclmixError as error:
            raise PclmixError(str(error).replace(str(path), str(model.path))) from error


def _put(folder: Path, image: Path, files: carry.Files) -> Path:
    """Write the files of an image; a series becomes a folder of its name."""
    place = folder if image.name in files else folder / image.name
    carry.write_files(place, files)
    return folder / image.name


AHEAD = THREADS + 1  #: cases queued at a worker: those in progress and the next
ATTEMPTS = 3  #: attempts at a case whose worker is lost each time


@dataclass
class _Case:
    """A pending case: read by the worker or, if it cannot, sent with its content."""

    job: Job
    attempt: int = 1


@dataclass
class _Slot:
    """A worker and its queued cases."""

    actor: Any
    waking: Any  #: a ref until the worker has started (it may never fit), then None; no cases before that
    reads: bool = True  #: until it reports that it cannot read INPUT
    flying: dict[Any, _Case] = field(default_factory=dict)

    def takes(self, case: _Case) -> bool:
        """A case whose worker was lost runs alone: if it causes the loss, no other case is affected."""
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

    `workers` limits their number; by default there are as many as fit on the cluster. A worker reads and writes
    the driver's folders if it sees them; otherwise Ray transfers images and label maps.
    """
    assert options.address is not None
    model, source, out = Path(model).resolve(), Path(source).resolve(), Path(out).resolve()
    files = model_files(model)
    with connect(options.address) as cluster:
        cluster.require_ready()
        wanted = cluster.resources(options, device)
        room = sum(node.slots(wanted) for node in cluster.nodes())
        name = f"shelf-{uuid.uuid4().hex}"
        shelf = cluster.actor(carry.Shelf, files[0].parent, files, resources=Resources(0), node=cluster.here, name=name)
        sent = Model(
            model,
            content_key(files),
            tuple(path.name for path in files),
            name,
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
        if not cluster.ready([first.waking], WAIT):
            log.warning(f"waiting for a worker with {wanted}: other tasks may have the cluster's cores or GPUs")
        archive = Archive(cluster.get(first.waking), source, out, choices, fold)
        count = min(room, workers or room, len(archive.todo))
        slots = [first, *(start() for _ in range(1, count))]
        _Stream(cluster, archive, slots, token, progress).run()
        del shelf  # Ray ends an actor that nobody holds
        return archive.finish()


class _Stream:
    """Streams the cases of an archive through the workers."""

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
        """Queue cases at the workers, at the one with the fewest first."""
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
        """Wait at most a second for a case or a worker."""
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
