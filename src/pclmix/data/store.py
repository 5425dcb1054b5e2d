"""The training store: every slice preprocessed once, cached by content and settings, mapped into memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from pclmix.data.case import CaseFiles, Finding, Source, check_case
from pclmix.data.check import require_sound
from pclmix.data.dataset import Dataset
from pclmix.data.preprocess import Preprocessing, kept_pixels
from pclmix.errors import PclmixError
from pclmix.io.files import atomic_folder, atomic_path, read_json, require_writable, write_json

FORMAT = 5  # increase when preparation changes, so that older caches are rebuilt
#: A method's own label maps of one slice, from image (C, H, W) in [0, 1] and scribble (H, W): name -> (H, W) labels.
Precompute = Callable[[npt.NDArray[np.float32], npt.NDArray[np.int16]], dict[str, npt.NDArray[np.int16]]]


@dataclass(frozen=True)
class Settings(Preprocessing):
    """Settings that determine the content of a store, besides the files."""

    source: Source = "scribble"
    maps: str = ""  #: name of the method whose label maps are added, or empty


def _nothing() -> Any:
    """An empty array, for stores not made from a dataset."""
    return np.zeros((0, 0), np.int64)


@dataclass(frozen=True)
class Store:
    """All slices of some cases: images (N, C, H, W) float16, labels (N, 1 + M, H, W) int16 with IGNORE.

    labels[:, 0] are the labels trained on; the rest are the maps named in `maps`.
    """

    images: npt.NDArray[np.float16]
    labels: npt.NDArray[np.int16]
    maps: tuple[str, ...]
    cases: tuple[str, ...]
    case_of: npt.NDArray[np.int64]  #: (N,) index into `cases`
    spacings: tuple[tuple[float, float, float], ...]  #: per case, millimetres along Z, H, W
    drawn: npt.NDArray[np.int64] = field(default_factory=_nothing)  #: (cases, K) labelled pixels in the files
    kept: npt.NDArray[np.int64] = field(default_factory=_nothing)  #: (cases, K) those preserved at working size
    dense: npt.NDArray[np.bool_] = field(default_factory=_nothing)  #: (cases,) every pixel is labelled: a mask
    shown: npt.NDArray[np.bool_] = field(default_factory=_nothing)  #: (cases, K) classes at working size
    folder: Path | None = None  #: the mapped folder
    #: (cases, K) whether the class was annotated. If not, its absence has no meaning.
    annotated: npt.NDArray[np.bool_] = field(default_factory=_nothing)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def kept_share(self) -> float:
        """Share of labelled pixels preserved at working size."""
        return float(self.kept.sum() / max(1, self.drawn.sum()))

    @property
    def nbytes(self) -> int:
        return int(self.images.nbytes + self.labels.nbytes)


def open_store(
    dataset: Dataset,
    cases: Sequence[str],
    settings: Settings,
    *,
    precompute: Precompute | None = None,
    cache: Path | None = None,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] = lambda items, _: items,
    found: Sequence[Finding] = (),
) -> Store:
    """Map the store of these cases into memory; prepare it first if the cache does not have it.

    Preparation checks the cases as `pclmix check` does and raises on errors, including those already `found`. Each file
    is read once: to recognise its store, or to hash, check and preprocess it.
    """
    cache = cache or cache_folder()
    known = cache / "known" / _signature(dataset, cases, settings)
    before = _read_known(known)
    folder = _find(known, dataset, cases, settings)
    if folder is None:
        with _preparing(known):
            if _read_known(known) != before:  # prepared by another process meanwhile
                folder = _find(known, dataset, cases, settings)
            if folder is None:
                folder = _prepare(dataset, cases, settings, precompute, cache, progress, found)
                with atomic_path(known) as temporary:
                    temporary.write_text(folder.name, encoding="ascii")
    require_sound(dataset, found)
    return map_store(folder, dataset)


def read_store(
    dataset: Dataset,
    cases: Sequence[str],
    settings: Settings,
    precompute: Precompute | None = None,
    found: Sequence[Finding] = (),
) -> Store:
    """A store in memory, without a cache, for a few cases."""
    read = list(_all_read([(dataset, case, settings, precompute) for case in cases]))
    require_sound(dataset, [*found, *(finding for case in read for finding in case.findings)])
    slices = [case.slices for case in read if case.slices is not None]
    columns = {key: [one.about[key] for one in slices] for key in slices[0].about}
    images, labels = (np.concatenate([getattr(one, name) for one in slices]) for name in ("images", "labels"))
    return _store(images, labels, {"cases": list(cases), "maps": slices[0].maps, **columns}, dataset)


def _find(known: Path, dataset: Dataset, cases: Sequence[str], settings: Settings) -> Path | None:
    """The store of files with these sizes, if their content is unchanged."""
    name = _read_known(known)
    folder = known.parents[1] / name
    if not name or not _is_whole(folder):
        return None
    with ThreadPoolExecutor(_workers(len(cases))) as pool:
        try:
            digests = list(pool.map(lambda case: CaseFiles(dataset, case).digest(settings.source), cases))
        except OSError:
            return None
    return folder if content_key(dataset, cases, settings, digests) == name else None


def _read_known(known: Path) -> str:
    try:
        return known.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


@contextmanager
def _preparing(known: Path) -> Iterator[None]:
    """One process of this computer prepares a store; the others wait for it and map the same files."""
    lock = known.parents[1] / "locks" / known.name
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(lock)
        held.acquire()
    except (OSError, NotImplementedError):  # a filesystem without locks; a full one fails on writing
        yield
        return
    try:
        yield
    finally:
        held.release()


def cache_folder() -> Path:
    """PCLMIX_CACHE, or the user's cache folder. It can be deleted at any time: stores are prepared again."""
    base = os.environ.get("PCLMIX_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pclmix"


def content_key(dataset: Dataset, cases: Sequence[str], settings: Settings, digests: Iterable[bytes]) -> str:
    """A name that changes when the bytes of any file, the classes or the settings change."""
    total = hashlib.blake2b(_head(dataset, cases, settings), digest_size=16)
    for digest in digests:
        total.update(digest)
    return total.hexdigest()


def _signature(dataset: Dataset, cases: Sequence[str], settings: Settings) -> str:
    """As `content_key`, but from file sizes: finds candidate stores before files are read."""
    total = hashlib.blake2b(_head(dataset, cases, settings), digest_size=16)
    for case in cases:
        for path in (*dataset.image_paths(case), CaseFiles(dataset, case).label_path(settings.source)):
            size = path.stat().st_size if path.is_file() else -1
            total.update(size.to_bytes(8, "little", signed=True))
    return total.hexdigest()


def _head(dataset: Dataset, cases: Sequence[str], settings: Settings) -> bytes:
    head = {"format": FORMAT, "settings": repr(settings), "labels": dataset.labels.to_json(), "cases": list(cases)}
    return json.dumps(head, sort_keys=True).encode()


Job = tuple[Dataset, str, Settings, Precompute | None]


@dataclass(frozen=True)
class _Slices:
    """One preprocessed case: images and labels as in a store, and its index entry."""

    images: npt.NDArray[np.float16]
    labels: npt.NDArray[np.int16]
    maps: tuple[str, ...]
    about: dict[str, Any]


@dataclass(frozen=True)
class _Read:
    """One case as read: digest of its files, and slices or findings."""

    digest: bytes
    slices: _Slices | None
    findings: list[Finding]


def _read_case(job: Job) -> _Read:
    dataset, case, settings, precompute = job
    files = CaseFiles(dataset, case)
    try:
        digest = files.digest(settings.source)
    except OSError:
        digest = b""  # the check reports the file
    findings = check_case(files, settings.source == "reference", False, settings).findings
    if any(finding.level == "error" for finding in findings):
        return _Read(digest, None, findings)
    return _Read(digest, _prepare_case(files, settings, precompute), findings)


def _prepare_case(files: CaseFiles, settings: Settings, precompute: Precompute | None) -> _Slices:
    volume, (label, geometry) = files.image(), files.labels(settings.source)
    difference = volume.geometry.same_grid(geometry)
    if difference:
        raise PclmixError(f"{files.label_path(settings.source)} and its image: {difference}")
    images = settings.images(volume.array)
    labels = settings.labels(label)[:, None]
    names: tuple[str, ...] = ()
    if precompute is not None:
        maps = [precompute(image, own[0]) for image, own in zip(images, labels, strict=True)]
        names = tuple(sorted(maps[0]))
        labels = np.concatenate([labels, np.stack([[m[n] for n in names] for m in maps])], axis=1)
    count, own = files.dataset.labels.count, labels[:, 0]
    about = {
        "slices": len(images),
        "spacing": volume.geometry.spacing,
        "drawn": np.bincount(label[label >= 0], minlength=count).tolist(),
        "kept": kept_pixels(label, settings.reduced(label), count).tolist(),
        "dense": bool((label >= 0).all()),
        "shown": (np.bincount(own[own >= 0], minlength=count) > 0).tolist(),
    }
    return _Slices(images.astype(np.float16, order="C"), labels.astype(np.int16, order="C"), names, about)


def _prepare(
    dataset: Dataset,
    cases: Sequence[str],
    settings: Settings,
    precompute: Precompute | None,
    cache: Path,
    progress: Callable[[Iterable[Any], int], Iterable[Any]],
    found: Sequence[Finding],
) -> Path:
    """Read every case and write the store; returns its folder, named by content."""
    jobs = [(dataset, case, settings, precompute) for case in cases]
    rows: list[dict[str, Any]] = []
    digests, findings = [], list(found)
    names, shape = (), ()
    _remove_old_stores(cache)
    require_writable(cache)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".store-", dir=cache) as name:
        temporary = Path(name)
        with (temporary / "images.f16").open("wb") as images, (temporary / "labels.i16").open("wb") as labels:
            for case in progress(_all_read(jobs), len(jobs)):
                digests.append(case.digest)
                findings += case.findings
                if case.slices is not None:
                    _write(images, case.slices.images)
                    _write(labels, case.slices.labels)
                    rows.append(case.slices.about)
                    shape, names = case.slices.images.shape[1:], case.slices.maps
        require_sound(dataset, findings)
        columns = {key: [row[key] for row in rows] for key in rows[0]} if rows else {"slices": []}
        write_json(temporary / "index.json", {"cases": list(cases), "shape": shape, "maps": names, **columns})
        folder = cache / content_key(dataset, cases, settings, digests)
        if not _is_whole(folder):  # else the same files were prepared elsewhere, and their store may be mapped now
            with atomic_folder(folder, overwrite=True) as target:
                for path in temporary.iterdir():
                    path.replace(target / path.name)
    return folder


def _write(file: BinaryIO, array: npt.NDArray[Any]) -> None:
    try:
        file.write(array.data)  # not tofile, whose errors lack the cause
    except OSError as error:
        raise PclmixError(
            f"cannot write {Path(file.name).parents[1]}: {error.strerror}; prepared slices are kept there: free some "
            "space, or set PCLMIX_CACHE to another folder"
        ) from error


def _all_read(jobs: Sequence[Job]) -> Iterator[_Read]:
    """Cases in order, so that a store has one layout; a few are read ahead.

    Threads suffice: reading, inflating, NumPy and the solvers of methods' maps release the GIL. Processes would be no
    faster, and each would import the user's script again.
    """
    workers = _workers(len(jobs))
    pool = ThreadPoolExecutor(workers)
    ahead: deque[Future[_Read]] = deque()
    try:
        for job in jobs:
            ahead.append(pool.submit(_read_case, job))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _workers(jobs: int) -> int:
    return max(1, min(os.cpu_count() or 1, 8, jobs))


def _is_whole(folder: Path) -> bool:
    """Whether a store is complete; one truncated by a crash or a full disk is prepared again."""
    try:
        index = read_json(folder / "index.json")
        pixels = sum(index["slices"]) * math.prod(index["shape"][1:])
        sizes = {"images.f16": 2 * pixels * index["shape"][0], "labels.i16": 2 * pixels * (1 + len(index["maps"]))}
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (PclmixError, OSError, KeyError, TypeError, ValueError, IndexError, AttributeError):
        return False


def map_store(folder: Path, dataset: Dataset) -> Store:
    """Map a store that is in the cache."""
    index = read_json(folder / "index.json")
    n, (c, h, w) = sum(index["slices"]), index["shape"]
    images = np.memmap(folder / "images.f16", np.float16, "r", shape=(n, c, h, w))
    labels = np.memmap(folder / "labels.i16", np.int16, "r", shape=(n, 1 + len(index["maps"]), h, w))
    # The least recently used stores are removed first; the system's access times are too coarse.
    os.utime(folder, ns=(time.time_ns(), time.time_ns()))
    return _store(images, labels, index, dataset, folder)


def _store(images: Any, labels: Any, index: dict[str, Any], dataset: Dataset, folder: Path | None = None) -> Store:
    return Store(
        images,
        labels,
        tuple(index["maps"]),
        tuple(index["cases"]),
        np.repeat(np.arange(len(index["cases"])), index["slices"]),
        tuple(tuple(s) for s in index["spacing"]),
        np.array(index["drawn"], np.int64),
        np.array(index["kept"], np.int64),
        np.array(index["dense"], bool),
        np.array(index["shown"], bool),
        folder,
        np.stack([dataset.annotated(case) for case in index["cases"]]),
    )


def _remove_old_stores(cache: Path, keep: int = 20) -> None:
    """Remove all but the `keep` most recently used stores, and temporary files of processes killed days ago."""
    if cache.is_dir():
        for stray in cache.glob(".*-????????"):
            if stray.is_dir() and time.time() - stray.stat().st_mtime > 2 * 86400:
                shutil.rmtree(stray, ignore_errors=True)
        stores = sorted((p for p in cache.iterdir() if (p / "index.json").is_file()), key=lambda p: p.stat().st_mtime)
        for old in stores[: max(0, len(stores) - keep)]:
            shutil.rmtree(old, ignore_errors=True)
        for known in (cache / "known").glob("*"):
            if not (cache / _read_known(known)).is_dir():
                known.unlink(missing_ok=True)
