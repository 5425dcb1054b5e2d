"""Many images to label maps: reading, network and writing overlap, so that the slowest of them sets the pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pclmix import __version__
from pclmix.data import dicom, nrrd
from pclmix.data.dataset import Dataset
from pclmix.data.volume import Geometry, ending_of, stem_of, write_map
from pclmix.errors import PclmixError
from pclmix.files import atomic_path, read_json, write_json
from pclmix.labels import Labels
from pclmix.predict.base import TTA, Array, Predictor
from pclmix.predict.inputs import Job, find_jobs
from pclmix.predict.uncertainty import FOLDER, Examined, examine, write_quality, write_tables

RECORD, SNAP = "prediction.json", "labels.txt"
_WORKERS = 2  # threads for reading and for writing: inflating a volume is slower than predicting it on a GPU
_AHEAD = 3  # volumes held on either side of the network; this bounds memory
_PREPARED = 2**26  # bytes of prepared slices that a volume may have waiting; larger ones are prepared as they go
Also = Literal["slicer", "dicom"]
Progress = Callable[[int, int], None]


@dataclass
class Outcome:
    """What became of the cases; `bad` maps a case to what is wrong with it."""

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    trained_on: int = 0  #: cases among them that the model has seen in training

    def require_good(self) -> None:
        """Raise one error that lists every bad case."""
        if self.bad:
            total = len(self.done) + len(self.skipped) + len(self.bad)
            lines = "\n".join(f"  {case}: {reason}" for case, reason in sorted(self.bad.items()))
            raise PclmixError(f"{len(self.bad)} of {total} cases could not be predicted:\n{lines}")


@dataclass(frozen=True)
class _Read:
    """A case as the network wants it: prepared slices in batches, and the grid to write over."""

    batches: Iterable[Array]
    geometry: Geometry


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
    """Predict INPUT (a file, a folder or a dataset) into OUT. What is there already is left as it is.

    A case that cannot be predicted is noted in the outcome, and the others go on. `uncertainty` adds entropy maps,
    OUT/uncertainty/CASE, and the tables quality.csv and slices.csv. `also` writes the labels in further formats:
    slicer is CASE.seg.nrrd, dicom is CASE.seg.dcm, where INPUT is a DICOM series. `progress(done, total)` is called
    after each case.
    """
    source, out = Path(source), Path(out)
    about = predictor.about
    jobs = find_jobs(source, out, channels=about.channels, labels=about.labels, fold=fold)
    outcome = Outcome(trained_on=_trained_on(source, predictor, jobs))
    folder = jobs[0].out.parent
    if uncertainty and out != folder:
        raise PclmixError(f"--uncertainty writes maps and tables beside the labels: OUT must be a folder, not {out}")
    if "dicom" in also and not source.is_dir():
        raise PclmixError(f"--dicom-seg refers to the slices of a DICOM series; {source} is not one")
    record = _record(predictor, tta, largest_component)
    if out == folder:
        _require_same_model(folder, record)
    todo = [job for job in jobs if not _is_done(job, uncertainty, also)]
    outcome.skipped = [job.case for job in jobs if job not in todo]
    if todo:
        predictor.check_tta(tta)
    if todo and out == folder:
        write_json(folder / RECORD, record)
        with atomic_path(folder / SNAP) as temporary:
            temporary.write_text(snap_labels(about.labels), encoding="utf-8")

    def read(job: Job) -> _Read:
        array, geometry = predictor.read(job.images)
        batches = predictor.batches(predictor.as_image(array))
        height, width = about.size
        small = 4 * len(array) * geometry.shape[0] * height * width <= _PREPARED
        return _Read(list(batches) if small else batches, geometry)

    def write(job: Job, labels: Array, examined: Examined | None, geometry: Geometry) -> None:
        if examined is not None:
            write_map(_map_path(job), examined.entropy, geometry, "entropy of the prediction")
            write_quality(folder, job.case, examined.quality)
        labels = predictor.largest(labels) if largest_component else labels
        for kind in also:
            _write_also(kind, job, labels, geometry, about.labels)
        # Last: a case counts as done when its labels are there.
        predictor.write(job.out, labels, geometry)

    def settle(job: Job, written: Future[None]) -> None:
        try:
            written.result()
            outcome.done.append(job.case)
        except PclmixError as error:
            outcome.bad[job.case] = str(error)
        tell()

    def tell() -> None:
        if progress is not None:
            progress(len(outcome.done) + len(outcome.skipped) + len(outcome.bad), len(jobs))

    tell()
    reading, writing = ThreadPoolExecutor(_WORKERS), ThreadPoolExecutor(_WORKERS)
    writes: deque[tuple[Job, Future[None]]] = deque()
    try:
        for job, future in _ahead(reading, read, todo):
            try:
                case = future.result()
                size = case.geometry.shape[1:]
                examined = examine(predictor.uncertain_batches(case.batches, size, tta)) if uncertainty else None
                labels = examined.labels if examined is not None else predictor.label(case.batches, size, tta)
            except PclmixError as error:
                outcome.bad[job.case] = str(error)
                tell()
                continue
            writes.append((job, writing.submit(write, job, labels, examined, case.geometry)))
            if len(writes) > _AHEAD:
                settle(*writes.popleft())
        while writes:
            settle(*writes.popleft())
    finally:
        reading.shutdown(cancel_futures=True)
        writing.shutdown(cancel_futures=True)
    if uncertainty:
        write_tables(folder, about.labels.foreground)
    return outcome


def _is_done(job: Job, uncertainty: bool, also: Sequence[Also]) -> bool:
    wanted = [job.out, *([_map_path(job)] if uncertainty else []), *(_also_path(kind, job) for kind in also)]
    return all(path.exists() for path in wanted)


def _also_path(kind: Also, job: Job) -> Path:
    return job.out.with_name(f"{stem_of(job.out)}{nrrd.ENDING if kind == 'slicer' else dicom.ENDING}")


def _write_also(kind: Also, job: Job, labels: Array, geometry: Geometry, classes: Labels) -> None:
    path = _also_path(kind, job)
    if kind == "slicer":
        nrrd.write_segmentation(path, labels, geometry, classes)
    elif not job.images[0].is_dir():
        raise PclmixError(f"{job.images[0]} is not a DICOM series, which --dicom-seg needs")
    else:
        dicom.write_segmentation(path, labels, dicom.read_series(job.images[0]), classes)


def _map_path(job: Job) -> Path:
    """OUT/uncertainty/CASE in a format that holds real numbers."""
    ending = ending_of(job.out)
    return job.out.parent / FOLDER / f"{job.case}{ending if ending.startswith('.nii') else '.tif'}"


def snap_labels(labels: Labels) -> str:
    """Names and colours as an ITK-SNAP label description, which 3D Slicer and others read too."""
    lines = ["# ITK-SnAP Label Description File", "# IDX  -R-  -G-  -B-  -A--  VIS MSH  LABEL"]
    for k, (name, colour) in enumerate(zip(labels.names, labels.colours(), strict=True)):
        r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        shown = int(k > 0)
        lines.append(f'{k:5d} {r:5d} {g:4d} {b:4d} {shown:8d} {shown:4d} {shown:3d}    "{name}"')
    return "\n".join(lines) + "\n"


def _ahead(
    pool: ThreadPoolExecutor, work: Callable[[Job], _Read], jobs: list[Job]
) -> Iterator[tuple[Job, Future[_Read]]]:
    """Jobs in order with their work begun, never more than a few ahead of who takes them."""
    begun: deque[tuple[Job, Future[_Read]]] = deque()
    for job in jobs:
        begun.append((job, pool.submit(work, job)))
        if len(begun) >= _AHEAD:
            yield begun.popleft()
    while begun:
        yield begun.popleft()


def _record(predictor: Predictor, tta: TTA, largest_component: bool) -> dict[str, object]:
    about = predictor.about
    return {
        "model": about.source,
        "identity": about.identity,
        "labels": {name: k for k, name in enumerate(about.labels.names)},
        "colours": dict(zip(about.labels.names, about.labels.colours(), strict=True)),
        "temperature": about.temperature,
        "offset": about.offset,
        "tta": tta,
        "largest_component": largest_component,
        "version": __version__,
    }


def _require_same_model(folder: Path, record: dict[str, object]) -> None:
    """A folder holds the predictions of one model with one set of options: skipping what is done relies on it."""
    path = folder / RECORD
    if not path.is_file():
        return
    before = read_json(path)
    if isinstance(before, dict):
        before = {"offset": {}, **before}  # folders from before there was one have none
    for key in ("offset", "identity", "tta", "largest_component"):
        if not isinstance(before, dict) or before.get(key) != record[key]:
            what = "another model" if key == "identity" else f"another setting of {key.replace('_', '-')}"
            raise PclmixError(f"{folder} holds predictions of {what} ({path}); choose another OUT or remove it first")


def _trained_on(source: Path, predictor: Predictor, jobs: list[Job]) -> int:
    """How many of a dataset's cases the model was trained on: scores of those say nothing."""
    if not (source / "dataset.json").is_file() or Dataset.open(source).name != predictor.about.dataset:
        return 0
    return len({job.case for job in jobs} & set(predictor.about.trained_on))
