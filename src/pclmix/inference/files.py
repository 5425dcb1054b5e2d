"""Predict many images; reading, network and writing overlap."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pclmix import __version__
from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.inference.inputs import Job, find_jobs
from pclmix.inference.predictor import TTA, About, Array, Predictor
from pclmix.inference.uncertainty import FOLDER, Examined, examine, write_quality, write_tables
from pclmix.io import dicom
from pclmix.io.files import atomic_path, read_json, sweep_folder, sweep_leftovers, write_json
from pclmix.io.volume import NRRD_ENDING, Geometry, stem_of, write_map, write_nrrd
from pclmix.labels import Labels, snap_labels

RECORD, SNAP = "prediction.json", "labels.txt"
_WORKERS = 2  # threads for reading and for writing: decompressing a volume is slower than predicting it on a GPU
_AHEAD = 3  # volumes in memory before and after the network
_PREPARED = 2**26  # bytes of slices prepared ahead per volume; larger volumes are prepared batch by batch
Also = Literal["slicer", "dicom"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Choices:
    """What is written for each case, and how it is predicted."""

    tta: TTA = "none"
    largest_component: bool = False
    uncertainty: bool = False
    also: tuple[Also, ...] = ()


@dataclass(frozen=True)
class Read:
    """A case after reading: prepared slices in batches, and the grid of its label map."""

    batches: Iterable[Array]
    geometry: Geometry


@dataclass(frozen=True)
class Found:
    """A case after prediction."""

    labels: Array
    examined: Examined | None
    geometry: Geometry


class CaseWork:
    """The three steps of a case. Different cases may be in different steps at once; the network takes one at a time."""

    def __init__(self, predictor: Predictor, choices: Choices) -> None:
        self.predictor, self.choices = predictor, choices

    def read(self, job: Job) -> Read:
        array, geometry = self.predictor.read(job.images)
        batches = self.predictor.batches(array)
        height, width = self.predictor.about.size
        small = 4 * len(array) * geometry.shape[0] * height * width <= _PREPARED
        return Read(list(batches) if small else batches, geometry)

    def predict(self, case: Read) -> Found:
        size, tta = (case.geometry.shape[1], case.geometry.shape[2]), self.choices.tta
        if not self.choices.uncertainty:
            return Found(self.predictor.label(case.batches, size, tta), None, case.geometry)
        examined = examine(self.predictor.uncertain_batches(case.batches, size, tta))
        return Found(examined.labels, examined, case.geometry)

    def write(self, job: Job, found: Found) -> None:
        if found.examined is not None:
            write_map(map_path(job), found.examined.entropy, found.geometry, "entropy of the prediction")
            write_quality(job.out.parent, job.case, found.examined.quality)
        labels = self.predictor.largest(found.labels) if self.choices.largest_component else found.labels
        for kind in self.choices.also:
            _write_also(kind, job, labels, found.geometry, self.predictor.about.labels)
        # Last: a case counts as done when its labels exist.
        self.predictor.write(job.out, labels, found.geometry)


def is_done(job: Job, choices: Choices) -> bool:
    wanted = [job.out, *([map_path(job)] if choices.uncertainty else []), *(_also_path(k, job) for k in choices.also)]
    return all(path.exists() for path in wanted)


def map_path(job: Job) -> Path:
    """OUT/uncertainty/CASE.nii.gz, also for pictures: their formats hold no real numbers."""
    return job.out.parent / FOLDER / f"{job.case}.nii.gz"


def _also_path(kind: Also, job: Job) -> Path:
    return job.out.with_name(f"{stem_of(job.out)}{NRRD_ENDING if kind == 'slicer' else dicom.ENDING}")


def _write_also(kind: Also, job: Job, labels: Array, geometry: Geometry, classes: Labels) -> None:
    path = _also_path(kind, job)
    if kind == "slicer":
        write_nrrd(path, labels, geometry, classes)
    elif not job.images[0].is_dir():
        raise PclmixError(f"{job.images[0]} is not a DICOM series, which --dicom-seg needs")
    else:
        dicom.write_segmentation(path, labels, dicom.read_series(job.images[0]), classes)


@dataclass
class Outcome:
    """The result per case; `bad` maps a case to its error."""

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    trained_on: int = 0  #: cases among them that the model was trained on

    def require_good(self) -> None:
        """Raise one error that lists every bad case."""
        if self.bad:
            total = len(self.done) + len(self.skipped) + len(self.bad)
            lines = "\n".join(f"  {case}: {reason}" for case, reason in sorted(self.bad.items()))
            raise PclmixError(f"{len(self.bad)} of {total} cases could not be predicted:\n{lines}")


class Archive:
    """The cases of INPUT, those missing in OUT, and the record in OUT."""

    def __init__(self, about: About, source: Path, out: Path, choices: Choices, fold: int | None) -> None:
        """Raises on invalid input before anything is predicted."""
        self.jobs = find_jobs(source, out, channels=about.channels, labels=about.labels, fold=fold)
        self.about, self.choices = about, choices
        self.folder = self.jobs[0].out.parent
        if choices.uncertainty and out != self.folder:
            raise PclmixError(
                f"--uncertainty writes maps and tables beside the labels: OUT must be a folder, not {out}"
            )
        first = self.jobs[0].images[0]
        if "dicom" in choices.also and not first.is_dir():
            raise PclmixError(f"--dicom-seg refers to the slices of a DICOM series; {first} is not one")
        self.record = _Record(self.folder if out == self.folder else None, about, choices)
        self.record.require_same()
        self.todo = [job for job in self.jobs if not is_done(job, choices)]
        waiting = {job.case for job in self.todo}
        skipped = [job.case for job in self.jobs if job.case not in waiting]
        self.outcome = Outcome(skipped=skipped, trained_on=_trained_on(source, about, self.jobs))
        sweep_folder(self.folder, {job.out.name for job in self.jobs})

    @property
    def settled(self) -> int:
        """Number of cases that are done or failed."""
        return len(self.outcome.done) + len(self.outcome.skipped) + len(self.outcome.bad)

    def tidy(self) -> None:
        """Remove the record if there is no label map."""
        if not any(job.out.exists() for job in self.jobs):
            self.record.undo()

    def finish(self) -> Outcome:
        """Write the tables over all cases, and remove temporary files of killed processes."""
        if self.choices.uncertainty and (self.outcome.done or self.outcome.skipped):
            write_tables(self.folder, self.about.labels.foreground)
        for folder in (self.folder, self.folder / FOLDER):
            sweep_leftovers(folder)
        return self.outcome


def predict_files(
    predictor: Predictor,
    source: Path | str,
    out: Path | str,
    *,
    fold: int | None = None,
    tta: TTA = "none",
    largest_component: bool = False,
    uncertainty: bool = False,
    also: Sequence[Also] = (),
    progress: Progress | None = None,
) -> Outcome:
    """Predict INPUT (a file, a folder, a list or a dataset) into OUT; cases that OUT holds already are skipped.

    A case that cannot be predicted is listed in the outcome, and the others continue. `uncertainty` adds entropy maps,
    OUT/uncertainty/CASE, and the tables quality.csv and slices.csv. `also` writes the labels in further formats:
    slicer is CASE.seg.nrrd, dicom is CASE.seg.dcm, where INPUT is a DICOM series. `progress(done, total)` is called
    after each case.
    """
    choices = Choices(tta, largest_component, uncertainty, tuple(also))
    archive = Archive(predictor.about, Path(source), Path(out), choices, fold)
    outcome, work = archive.outcome, CaseWork(predictor, choices)

    def settle(job: Job, written: Future[None]) -> None:
        try:
            written.result()
            outcome.done.append(job.case)
        except PclmixError as error:
            outcome.bad[job.case] = str(error)
        tell()

    def tell() -> None:
        if progress is not None:
            progress(archive.settled, len(archive.jobs))

    tell()
    reading, writing = ThreadPoolExecutor(_WORKERS), ThreadPoolExecutor(_WORKERS)
    writes: deque[tuple[Job, Future[None]]] = deque()
    try:
        for job, future in _ahead(reading, work.read, archive.todo):
            try:
                found = work.predict(future.result())
            except PclmixError as error:
                outcome.bad[job.case] = str(error)
                tell()
                continue
            archive.record.write()
            writes.append((job, writing.submit(work.write, job, found)))
            if len(writes) > _AHEAD:
                settle(*writes.popleft())
        while writes:
            settle(*writes.popleft())
    finally:
        reading.shutdown(cancel_futures=True)
        writing.shutdown(cancel_futures=True)
        archive.tidy()
    return archive.finish()


def _ahead(
    pool: ThreadPoolExecutor, work: Callable[[Job], Read], jobs: list[Job]
) -> Iterator[tuple[Job, Future[Read]]]:
    """Jobs in order with their work started, at most _AHEAD of them before the consumer."""
    begun: deque[tuple[Job, Future[Read]]] = deque()
    for job in jobs:
        begun.append((job, pool.submit(work, job)))
        if len(begun) >= _AHEAD:
            yield begun.popleft()
    while begun:
        yield begun.popleft()


class _Record:
    """prediction.json and labels.txt of a folder of predictions: the model, its options, the classes.

    Written before the first label map and removed if none follows, so that a bad image leaves no files behind.
    """

    def __init__(self, folder: Path | None, about: About, choices: Choices) -> None:
        """`folder` is None where OUT is a file: then neither is written."""
        self.folder, self.labels = folder, about.labels
        self.content = {
            "model": about.source,
            "identity": about.identity,
            "labels": {name: k for k, name in enumerate(about.labels.names)},
            "colours": dict(zip(about.labels.names, about.labels.colours(), strict=True)),
            "temperature": about.temperature,
            "tta": choices.tta,
            "largest_component": choices.largest_component,
            "version": __version__,
        }
        self._made: list[Path] = []  # files and folders created here, in order

    def require_same(self) -> None:
        """Refuse a folder with predictions of another model or other options: its cases would be skipped."""
        if self.folder is None or not (self.folder / RECORD).is_file():
            return
        path = self.folder / RECORD
        before = read_json(path)
        for key in ("identity", "tta", "largest_component"):
            if not isinstance(before, dict) or before.get(key) != self.content[key]:
                what = "another model" if key == "identity" else f"another setting of {key.replace('_', '-')}"
                raise PclmixError(
                    f"{self.folder} holds predictions of {what} ({path}); choose another OUT or remove it first"
                )

    def write(self) -> None:
        """Write both files if they do not exist."""
        if self.folder is None or (self.folder / RECORD).is_file():
            return
        paths = [*reversed((self.folder, *self.folder.parents)), self.folder / SNAP, self.folder / RECORD]
        self._made = [path for path in paths if not path.exists()]
        with atomic_path(self.folder / SNAP) as temporary:
            temporary.write_text(snap_labels(self.labels), encoding="utf-8")
        write_json(self.folder / RECORD, self.content)  # last: if it exists, both do

    def undo(self) -> None:
        """Remove the files and empty folders that `write` made."""
        for path in reversed(self._made):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()


def _trained_on(source: Path, about: About, jobs: list[Job]) -> int:
    """Number of a dataset's cases that the model was trained on; their scores are not meaningful."""
    if not (source / "dataset.json").is_file() or Dataset.open(source).name != about.dataset:
        return 0
    return len({job.case for job in jobs} & set(about.trained_on))
