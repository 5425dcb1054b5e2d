"""Inputs of prediction: a file, a folder, a DICOM series, a dataset or an array, and the output path of each case."""

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
from pclmix.io.volume import ENDINGS, Volume, ending_of, stem_of
from pclmix.labels import Labels

Array = npt.NDArray[Any]
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

    `fold` takes the test cases of that fold of a dataset. A folder of DICOM files is one case, named as the folder.
    OUT is a folder, or a file where INPUT is one.
    """
    if not source.exists():
        raise PclmixError(f"{source} does not exist; INPUT is an image, a folder of images or a dataset")
    dataset = Dataset.open(source) if (source / "dataset.json").is_file() else None
    if fold is not None and dataset is None:
        raise PclmixError(f"--fold {fold}: {source} is not a dataset (it has no dataset.json), so it has no folds")
    if out.is_file() and not source.is_file():
        raise PclmixError(f"{out} is a file; OUT must be a folder where INPUT is one")
    if source.is_file():
        if not ending_of(source):
            raise PclmixError(f"{source}: unknown file ending; known are {', '.join(ENDINGS)}")
        case, images = channel_files(source, len(channels))
        return [Job(case, images, out if ending_of(out) and not out.is_dir() else out / _name(case, source))]
    if dataset is None and is_series(source) and not _images(source):
        case = source.resolve().name
        return [Job(case, (source,), out / f"{case}.nii.gz")]
    if dataset is None:
        return [Job(case, images, out / _name(case, images[0])) for case, images in _group(source).items()]
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
    """An array as (C, Z, H, W), and whether it was a picture without the axis Z.

    (H, W) and (Z, H, W) have one channel, (H, W, C) and (C, Z, H, W) as many as the model. An ambiguous shape is
    refused; the message says how to write it unambiguously.
    """
    array, count = np.asarray(given), len(channels)
    if array.dtype.kind not in "iufb" or (array.dtype.kind == "f" and not np.isfinite(array).all()):
        raise PclmixError("the image holds NaN, infinite or non-numeric values; repair it before predicting")
    if 0 in array.shape:
        raise PclmixError(f"the image of shape {array.shape} is empty")
    picture = array.ndim == 3 and array.shape[2] <= 4 < array.shape[0]  # else slices of width 4
    grey = picture and array.shape[2] == 3 and bool((array == array[..., :1]).all())
    if count == 1 and array.ndim == 2:
        return array[None, None], True
    if count == 1 and grey:  # three equal planes, as a grey picture saved in colour has
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
        return f"{named}, this is {array.shape[0]} as (C, Z, H, W)"
    if picture and count == 1:
        return f"{named}; use x[..., 0] or x.mean(-1) for a picture (H, W, C), x[None] for a volume (Z, H, W)"
    if picture:
        return f"{named}, this is {array.shape[2]} as (H, W, C)"
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


def _group(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Images of a folder by case. A number at the end of a name is a channel only where there is a channel 0000."""
    files = _images(folder)
    firsts = {stem_of(p)[: -len("_0000")] for p in files if stem_of(p).endswith("_0000")}
    groups: dict[str, list[Path]] = {}
    for path in files:
        match = _CHANNEL.match(stem_of(path))
        case = match["case"] if match is not None and match["case"] in firsts else stem_of(path)
        groups.setdefault(case, []).append(path)
        if ending_of(path) != ending_of(groups[case][0]):
            raise PclmixError(f"{groups[case][0]} and {path} are both case '{case}'; keep one of them")
    if not groups:
        raise PclmixError(f"{folder} holds no images ({', '.join(ENDINGS)}), no DICOM files and no dataset.json")
    return {case: tuple(paths) for case, paths in groups.items()}


def _images(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file() and ending_of(p) and not p.name.startswith("."))


def _name(case: str, image: Path) -> str:
    """The file name of a label map: .nii.gz for volumes, the image's own ending for pictures."""
    ending = ending_of(image)
    return f"{case}{'.nii.gz' if ending.startswith('.nii') else ending}"
