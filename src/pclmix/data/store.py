"""The training store: every slice prepared once, cached by content and settings, mapped into memory.

Preparing is intensity to [0, 1], images resized linearly (averaging when shrinking), labels picked, never made.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.files import atomic_folder, read_json, write_json
from pclmix.resize import resize_linear, resize_nearest

FORMAT = 2  # raise when preparing changes, so that older caches are rebuilt
Source = Literal["scribble", "reference"]
#: A method's own label maps of one slice, from image (C, H, W) in [0, 1] and scribble (H, W): name -> (H, W) labels.
Precompute = Callable[[npt.NDArray[np.float32], npt.NDArray[np.int16]], dict[str, npt.NDArray[np.int16]]]


@dataclass(frozen=True)
class Settings:
    """What decides the content of a store besides the files."""

    size: tuple[int, int]
    intensity: Literal["slice", "volume"] = "slice"
    source: Source = "scribble"
    maps: str = ""  #: name of the method whose own label maps are added, or empty


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

    def __len__(self) -> int:
        return len(self.images)

    @property
    def nbytes(self) -> int:
        return int(self.images.nbytes + self.labels.nbytes)


Range = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


def intensity_range(array: npt.NDArray[Any], intensity: str) -> Range:
    """Lowest and highest value of (C, Z, H, W), per channel and slice or per channel and volume, axes kept."""
    axes = (2, 3) if intensity == "slice" else (1, 2, 3)
    low, high = array.min(axis=axes, keepdims=True), array.max(axis=axes, keepdims=True)
    return low.astype(np.float32), high.astype(np.float32)


def normalise(array: npt.NDArray[Any], intensity: str, limits: Range | None = None) -> npt.NDArray[np.float32]:
    """Intensities (C, Z, H, W) to [0, 1], per channel and slice or per channel and volume; constant becomes 0.

    `limits` are given where `array` is a part of the volume that they were taken from.
    """
    low, high = limits or intensity_range(array, intensity)
    span = high - low
    array = array.astype(np.float32)
    scaled: npt.NDArray[np.float32] = np.divide(array - low, span, out=np.zeros_like(array), where=span > 0)
    return scaled


def prepare_image(array: npt.NDArray[Any], settings: Settings, limits: Range | None = None) -> npt.NDArray[np.float32]:
    """An image (C, Z, H, W) as the network sees it: slices (Z, C, *size) in [0, 1]."""
    return resize_linear(normalise(array, settings.intensity, limits), settings.size).swapaxes(0, 1)


def open_store(
    dataset: Dataset,
    cases: Sequence[str],
    settings: Settings,
    *,
    precompute: Precompute | None = None,
    cache: Path | None = None,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] = lambda items, _: items,
) -> Store:
    """Map the store of these cases into memory, preparing it first where the cache does not have it."""
    folder = (cache or cache_folder()) / content_key(dataset, cases, settings)
    if not _is_whole(folder):
        try:
            _prepare(dataset, cases, settings, precompute, folder, progress)
        except PclmixError:
            if not _is_whole(folder):
                raise
            # Another process was faster and its store is in place; it may be mapped already and stays.
    return _load(folder)


def cache_folder() -> Path:
    """PCLMIX_CACHE, or the user's cache folder. It can be deleted at any time: stores are prepared again."""
    base = os.environ.get("PCLMIX_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pclmix"


def _label_path(dataset: Dataset, case: str, source: Source) -> Path:
    return dataset.scribble_path(case) if source == "scribble" else dataset.reference_path(case)


def content_key(dataset: Dataset, cases: Sequence[str], settings: Settings) -> str:
    """A name that changes when any file's bytes, the classes or the settings change."""
    digest = hashlib.blake2b(digest_size=16)
    head = {"format": FORMAT, "settings": repr(settings), "labels": dataset.labels.to_json(), "cases": list(cases)}
    digest.update(json.dumps(head, sort_keys=True).encode())
    for case in cases:
        for path in (*dataset.image_paths(case), _label_path(dataset, case, settings.source)):
            try:
                digest.update(hashlib.blake2b(path.read_bytes(), digest_size=16).digest())
            except OSError as error:
                raise PclmixError(f"cannot read {path}: {error.strerror}; run `pclmix check {dataset.root}`") from error
    return digest.hexdigest()


Job = tuple[Dataset, str, Settings, Precompute | None]
Slices = tuple[npt.NDArray[np.float16], npt.NDArray[np.int16], tuple[str, ...], tuple[float, float, float]]


def _prepare_case(job: Job) -> Slices:
    dataset, case, settings, precompute = job
    volume = dataset.read_image(case)
    read = dataset.read_scribble if settings.source == "scribble" else dataset.read_reference
    label, geometry = read(case)
    difference = volume.geometry.same_grid(geometry)
    if difference:
        raise PclmixError(f"{_label_path(dataset, case, settings.source)} and its image: {difference}")
    images = prepare_image(volume.array, settings)
    labels = resize_nearest(label, settings.size)[:, None]
    names: tuple[str, ...] = ()
    if precompute is not None:
        maps = [precompute(image, own[0]) for image, own in zip(images, labels, strict=True)]
        names = tuple(sorted(maps[0]))
        labels = np.concatenate([labels, np.stack([[m[n] for n in names] for m in maps])], axis=1)
    return images.astype(np.float16, order="C"), labels.astype(np.int16, order="C"), names, volume.geometry.spacing


def _prepare(
    dataset: Dataset,
    cases: Sequence[str],
    settings: Settings,
    precompute: Precompute | None,
    folder: Path,
    progress: Callable[[Iterable[Any], int], Iterable[Any]],
) -> None:
    jobs = [(dataset, case, settings, precompute) for case in cases]
    slices: list[int] = []
    spacings, names, shape = [], (), ()
    _make_room(folder.parent)
    with atomic_folder(folder, overwrite=folder.exists()) as temporary:
        with (temporary / "images.f16").open("wb") as images, (temporary / "labels.i16").open("wb") as labels:
            for image, label, maps, spacing in progress(_prepared(jobs), len(jobs)):
                _write(images, image)
                _write(labels, label)
                slices.append(len(image))
                spacings.append(spacing)
                shape, names = image.shape[1:], maps
        index = {"cases": list(cases), "slices": slices, "shape": shape, "maps": names}
        write_json(temporary / "index.json", {**index, "spacings": spacings})


def _write(file: BinaryIO, array: npt.NDArray[Any]) -> None:
    try:
        file.write(array.data)  # not tofile, whose errors do not say what is wrong
    except OSError as error:
        raise PclmixError(
            f"cannot write {Path(file.name).parents[1]}: {error.strerror}; prepared slices are kept there: free some "
            "space, or set PCLMIX_CACHE to another folder"
        ) from error


def _prepared(jobs: Sequence[Job]) -> Iterator[Slices]:
    """Each case prepared, in order, so that a store has one layout; a few are ahead of the one that is asked for.

    Threads are enough: reading, inflating, NumPy's loops and the solvers behind methods' maps let go of the interpreter
    lock. Processes would be no faster, and would each read the user's script again.
    """
    workers = min(os.cpu_count() or 1, 8, len(jobs))
    pool = ThreadPoolExecutor(workers)
    ahead: deque[Future[Slices]] = deque()
    try:
        for job in jobs:
            ahead.append(pool.submit(_prepare_case, job))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _is_whole(folder: Path) -> bool:
    """Whether a store is there with all its bytes; one that a crash or a full disk cut short is prepared again."""
    try:
        index = read_json(folder / "index.json")
        pixels = sum(index["slices"]) * math.prod(index["shape"][1:])
        sizes = {"images.f16": 2 * pixels * index["shape"][0], "labels.i16": 2 * pixels * (1 + len(index["maps"]))}
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (PclmixError, OSError, KeyError, TypeError):
        return False


def _load(folder: Path) -> Store:
    index = read_json(folder / "index.json")
    n, (c, h, w) = sum(index["slices"]), index["shape"]
    images = np.memmap(folder / "images.f16", np.float16, "r", shape=(n, c, h, w))
    labels = np.memmap(folder / "labels.i16", np.int16, "r", shape=(n, 1 + len(index["maps"]), h, w))
    # The least recently used store goes first when there are many; the system's stamps are too coarse for small ones.
    os.utime(folder, ns=(time.time_ns(), time.time_ns()))
    return Store(
        images,
        labels,
        tuple(index["maps"]),
        tuple(index["cases"]),
        np.repeat(np.arange(len(index["cases"])), index["slices"]),
        tuple(tuple(s) for s in index["spacings"]),
    )


def _make_room(cache: Path, keep: int = 20) -> None:
    """Remove all but the `keep` most recently used stores, and what writers left that were killed days ago."""
    if cache.is_dir():
        for stray in cache.glob(".*-????????"):
            if stray.is_dir() and time.time() - stray.stat().st_mtime > 2 * 86400:
                shutil.rmtree(stray, ignore_errors=True)
        stores = sorted((p for p in cache.iterdir() if (p / "index.json").is_file()), key=lambda p: p.stat().st_mtime)
        for old in stores[: max(0, len(stores) - keep)]:
            shutil.rmtree(old, ignore_errors=True)
