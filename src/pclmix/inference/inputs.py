"""Inputs of prediction: a file, a folder, a list, a DICOM series, a dataset or an array; output path of each case."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pclmix.data.dataset import Dataset, read_channels
from pclmix.errors import PclmixError
from pclmix.io.dicom import is_series, read_series
from pclmix.io.volume import ENDINGS, LARGEST, PHOTOS, Volume, ending_of, image_ending_of, stem_of
from pclmix.labels import Labels

Array = npt.NDArray[Any]
LIST = ".txt"  #: the ending of a list of images
_CHANNEL = re.compile(r"^(?P<case>.+)_(?P<number>\d{4})$")


@dataclass(frozen=True)
class Job:
    """One case: its channel files, and the label map to write."""

    case: str
    images: tuple[Path, ...]
    out: Path


def find_jobs(
    source: Path, out: Path, *, channels: Sequence[str], labels: Labels, fold: int | None = None
) -> list[Job]:
    """The cases of INPUT in sorted order; a dataset must have the model's classes and channels.

    `fold` takes the test cases of that fold of a dataset. A folder of DICOM files is one case, named as the folder. A
    .txt file names an image or a DICOM series on each line. OUT is a folder, or a file where INPUT is an image.
    """
    require_exists(source)
    dataset = Dataset.open(source) if (source / "dataset.json").is_file() else None
    if fold is not None and dataset is None:
        raise PclmixError(f"--fold {fold}: {source} is not a dataset (it has no dataset.json), so it has no folds")
    listed = source.suffix.lower() == LIST and source.is_file()
    if out.is_file() and (listed or not source.is_file()):
        raise PclmixError(f"{out} is a file; OUT must be a folder where INPUT is one or a list")
    if listed:
        files = _read_list(source)
        if out.resolve() in {folder.resolve() for folder in {path.parent for path in files}}:
            raise PclmixError(f"{out} holds images of {source}; choose another OUT, apart from the images")
        groups = _group(files, f"{source} names no image; write one path on each line")
        return [Job(case, _all_channels(paths, channels), out / _name(case, paths[0])) for case, paths in groups]
    if source.is_file():
        if not image_ending_of(source):
            known = ", ".join((*ENDINGS, *PHOTOS))
            raise PclmixError(f"{source}: unknown file ending; known are {known}, and {LIST} for a list")
        case, images = channel_files(source, len(channels))
        return [Job(case, images, out if ending_of(out) and not out.is_dir() else out / _name(case, source))]
    if dataset is None and is_series(source) and not _images(source):
        case = source.resolve().name
        return [Job(case, (source,), out / f"{case}.nii.gz")]
    if dataset is None:
        nothing = f"{source} holds no images ({', '.join((*ENDINGS, *PHOTOS))}), no DICOM files and no dataset.json"
        return [Job(case, images, out / _name(case, images[0])) for case, images in _group(_images(source), nothing)]
    require_same_task(dataset, channels, labels)
    cases = dataset.cases if fold is None else dataset.fold(fold).test
    if not cases:
        raise PclmixError(f"{source} has no case to predict" + (f" in fold {fold}" if fold is not None else ""))
    found = {case: tuple(dataset.image_paths(case)) for case in sorted(cases)}
    return [Job(case, images, out / _name(case, images[0])) for case, images in found.items()]


def read_images(paths: Sequence[Path], count: int) -> Volume:
    """The `count` channels of one image; a folder is a DICOM series, which has one."""
    if not paths[0].is_dir():
        return read_channels(paths, count)
    series = read_series(paths[0])
    if count != 1:
        raise PclmixError(f"{paths[0]}: a DICOM series is one channel, {count} needed; convert each to NIfTI first")
    return Volume(series.array, series.geometry)


def array_to_image(given: Any, channels: Sequence[str]) -> tuple[Array, bool]:
    """An array as (C, Z, H, W), and whether it lacked the axis Z.

    (H, W) and (Z, H, W) have one channel, (H, W, C) and (C, Z, H, W) as many as the model. An ambiguous shape is
    refused; the message says how to write it unambiguously.
    """
    array, count = np.asarray(given), len(channels)
    if array.dtype.kind not in "iufb" or (array.dtype.kind == "f" and not (np.abs(array) <= LARGEST).all()):
        raise PclmixError("the image holds NaN, infinite, too large or non-numeric values; repair it before predicting")
    if 0 in array.shape:
        raise PclmixError(f"the image of shape {array.shape} is empty")
    picture = array.ndim == 3 and array.shape[2] <= 4 < array.shape[0]  # else slices of width 4
    grey = picture and array.shape[2] == 3 and bool((array == array[..., :1]).all())
    if count == 1 and array.ndim == 2:
        return array[None, None], True
    if count == 1 and (grey or (picture and array.shape[2] == 1)):  # grey has three equal planes: saved as RGB
        return array[None, None, ..., 0], True
    if count == 1 and array.ndim == 3 and not picture:
        return array[None], False
    if count > 1 and array.ndim == 3 and array.shape[2] == count != array.shape[0]:
        return np.moveaxis(array, -1, 0)[:, None], True
    if array.ndim == 4 and array.shape[0] == count:
        return array, False
    raise PclmixError(f"an image of shape {array.shape} does not fit this model: {_way_out(array, picture, channels)}")


def _way_out(array: Array, picture: bool, channels: Sequence[str]) -> str:
    count, named = len(channels), f"it takes {len(channels)} channel(s) ({', '.join(channels)})"
    if array.ndim == 4 and array.shape[3] == count:
        return f"{named} first, as (C, Z, H, W); use np.moveaxis(x, -1, 0)"
    if array.ndim == 4:
        return f"{named}, this image has {array.shape[0]} as (C, Z, H, W)"
    if picture and count == 1:
        return f"{named}; use x[..., 0] or x.mean(-1) for a picture (H, W, C), x[None] for a volume (Z, H, W)"
    if picture:
        return f"{named}, this image has {array.shape[2]} as (H, W, C)"
    if array.ndim == 3:
        return f"{named}; use x[:, None] for a picture (C, H, W), np.stack([...]) of its channels for a volume"
    forms = "(H, W), (Z, H, W) or (1, Z, H, W)" if count == 1 else f"(H, W, {count}) or ({count}, Z, H, W)"
    return f"{named}, as {forms}"


def require_same_task(dataset: Dataset, channels: Sequence[str], labels: Labels) -> None:
    """Refuse to predict a dataset whose classes or number of channels are not the model's."""
    if dataset.labels.names != labels.names:
        raise PclmixError(
            f"the model knows the classes {', '.join(labels.names)}, {dataset.root} has "
            f"{', '.join(dataset.labels.names)}; use a model trained on these classes, or give the folder of images"
        )
    if len(dataset.channels) != len(channels):
        raise PclmixError(
            f"the model takes {len(channels)} channel(s) ({', '.join(channels)}), {dataset.root} has "
            f"{len(dataset.channels)} ({', '.join(dataset.channels)})"
        )


def channel_files(path: Path, count: int) -> tuple[str, tuple[Path, ...]]:
    """Case and channel files of one image: CASE_0000 stands for its other channels too, as nnU-Net names them."""
    match = _CHANNEL.match(stem_of(path))
    if match is None or match["number"] != "0000":
        return stem_of(path), (path,)
    case, ending = match["case"], path.name[len(stem_of(path)) :]
    others = [path.with_name(f"{case}_{c:04d}{ending}") for c in range(1, count)]
    return case, (path, *(other for other in others if other.exists()))


def require_exists(source: Path) -> None:
    """Refuse an INPUT that does not exist."""
    if not source.exists():
        raise PclmixError(f"{source} does not exist; INPUT is an image, a folder of images, a list or a dataset")


def _read_list(source: Path) -> list[Path]:
    """The paths in a list; relative ones start at the list's folder."""
    try:
        lines = source.read_text(encoding="utf-8-sig").splitlines()
    except ValueError as error:
        raise PclmixError(f"{source} is not a text file; a list has one path on each line") from error
    return [source.parent / line.strip() for line in lines if line.strip()]


def _all_channels(paths: tuple[Path, ...], channels: Sequence[str]) -> tuple[Path, ...]:
    return channel_files(paths[0], len(channels))[1] if len(paths) == 1 else paths


def _group(files: Sequence[Path], nothing: str) -> list[tuple[str, tuple[Path, ...]]]:
    """Images by case, sorted. A number at the end of a name is a channel only where there is a channel 0000."""
    firsts = {p.with_name(_stem(p)[: -len("_0000")]) for p in files if _stem(p).endswith("_0000")}
    groups: dict[str, list[Path]] = {}
    for path in sorted(set(files)):
        match = _CHANNEL.match(_stem(path))
        case = match["case"] if match is not None and path.with_name(match["case"]) in firsts else _stem(path)
        first = groups.setdefault(case, [path])[0]
        if path == first:
            continue
        if path.parent != first.parent or image_ending_of(path) != image_ending_of(first):
            raise PclmixError(f"{first} and {path} are both case '{case}'; keep one of them")
        groups[case].append(path)
    if not groups:
        raise PclmixError(nothing)
    return sorted((case, tuple(paths)) for case, paths in groups.items())


def _stem(path: Path) -> str:
    """As `stem_of`, and the whole name of a DICOM series, in which dots are common."""
    return stem_of(path) if image_ending_of(path) else path.name


def _images(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file() and image_ending_of(p) and not p.name.startswith("."))


def _name(case: str, image: Path) -> str:
    """The file name of a label map: .nii.gz for volumes and series, a picture's own ending, .png for photos."""
    ending = image_ending_of(image)
    if not ending or ending.startswith(".nii"):
        return f"{case}.nii.gz"
    return f"{case}{'.png' if ending in PHOTOS else ending}"
