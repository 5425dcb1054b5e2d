"""Shared by importers: options, the plan of an import, and copying cases unchanged."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pclmix.data.dataset import (
    IMAGES,
    REFERENCE,
    SCRIBBLES,
    Dataset,
    default_splits,
    read_channels,
    write_dataset_json,
    write_splits,
)
from pclmix.errors import PclmixError
from pclmix.io.files import atomic_folder, refuse_existing, require_writable, write_json
from pclmix.io.threads import in_threads
from pclmix.io.volume import (
    PHOTOS,
    Geometry,
    ending_of,
    image_ending_of,
    read_image,
    read_labels,
    write_image,
    write_labels,
)
from pclmix.labels import Labels
from pclmix.registry import Registry

#: File value to the value in the dataset (a class, or the ignore label).
Values = Mapping[int, int]


@dataclass(frozen=True)
class Options:
    """Options of `pclmix import`; None and empty mean "not given"."""

    scribbles: Path | None = None
    masks: Path | None = None
    nifti: Path | None = None
    classes: tuple[str, ...] = ()
    ignore: int | None = None
    skip_unmatched: bool = False  #: leave out images without labels and labels without an image
    dense: bool = False  #: label cases that have a dense mask and no scribble by the mask
    unlabelled: bool = False  #: take other images without a scribble as unlabelled cases

    def only(self, kind: str, *allowed: str) -> None:
        """Refuse options that this kind of import does not use."""
        for option in fields(self):
            if option.name not in allowed and getattr(self, option.name) not in (None, (), False):
                known = ", ".join(flag(name) for name in allowed)
                raise PclmixError(f"{flag(option.name)} has no meaning for `pclmix import {kind}`; it takes {known}")


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Plan:
    """What an import writes: the contents of dataset.json, the cases, and a function that writes one case."""

    channels: tuple[str, ...]
    labels: Labels
    ending: str
    cases: tuple[str, ...]
    write: Callable[[str, Path], None]
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)  #: further keys of dataset.json


@dataclass(frozen=True)
class Sources:
    """The files of one case: one image per channel, the scribble and, optionally, a dense mask.

    Strokes of one class may come as two maps: `scribble` has the positive ones, `negative` those of the background.
    Without a scribble the mask is used for training, or nothing if the case is `unlabelled`.
    """

    images: tuple[Path, ...]
    scribble: Path | None
    mask: Path | None = None
    negative: Path | None = None
    unlabelled: bool = False


IMPORTERS: Registry[Callable[[Path, Options], Plan]] = Registry("import kind")


def import_dataset(
    kind: str, source: Path, target: Path, options: Options | None = None, *, show: bool = False
) -> tuple[Dataset, tuple[str, ...]]:
    """Write `target` from `source`; every file is read on the way. Returns the dataset and remarks for the user."""
    plan_for = IMPORTERS.find(kind)
    source, target = Path(source), Path(target)
    refuse_existing(target)
    require_writable(target)
    need_folder(source)
    plan = plan_for(source, options or Options())
    with atomic_folder(target) as folder:
        for name in (IMAGES, SCRIBBLES):
            (folder / name).mkdir()
        in_threads(lambda case: plan.write(case, folder), plan.cases, "importing", show=show)
        write_dataset_json(
            folder, channels=plan.channels, labels=plan.labels, ending=plan.ending, cases=len(plan.cases), **plan.extra
        )
        write_splits(folder, default_splits(plan.cases))
    return Dataset.open(target), plan.notes


def need_folder(path: Path) -> None:
    if not path.exists():
        raise PclmixError(f"{path} does not exist")
    if not path.is_dir():
        raise PclmixError(f"{path} is a file, a folder is needed")


def copy_case(
    case: str,
    sources: Sources,
    folder: Path,
    *,
    ending: str,
    channels: int,
    scribble_values: Values,
    mask_values: Values,
    ignore: int = 0,
) -> None:
    """Copy one case into the layout: bytes are kept unless the ending or the label values must change.

    The label file of an unlabelled case holds `ignore` alone.
    """
    volume = read_channels(sources.images, channels)
    if len(sources.images) == 1 and channels == 1 and ending in (".png", ".bmp", ".tif", ".tiff"):
        _copy_plain_image(sources.images[0], folder / IMAGES / f"{case}_0000{ending}", volume.array[0], volume.geometry)
    else:
        for c, path in enumerate(sources.images):
            copy_bytes(path, folder / IMAGES / f"{case}_{c:04d}{ending}")
    _copy_sidecar(folder / IMAGES / f"{case}.json", ending, volume.geometry)
    target = folder / SCRIBBLES / f"{case}{ending}"
    if sources.negative is not None and sources.scribble is not None:
        merge_strokes(sources.scribble, sources.negative, target, volume.geometry)
    elif sources.scribble is not None:
        copy_labels(sources.scribble, target, scribble_values, volume.geometry)
    elif sources.unlabelled:
        _write_on_grid(target, np.full(volume.geometry.shape, ignore), volume.geometry)
    elif sources.mask is not None:
        copy_labels(sources.mask, target, mask_values, volume.geometry)
    if sources.mask is not None:
        copy_labels(sources.mask, folder / REFERENCE / f"{case}{ending}", mask_values, volume.geometry)


_ALIKE = ({".tif", ".tiff"}, {".nii", ".nii.gz"}, *({photo, ".png"} for photo in PHOTOS))


def is_copyable(source: Path, ending: str) -> bool:
    """Whether `copy_bytes` can write an image with this ending."""
    before = image_ending_of(source)
    return before == ending or (ending not in PHOTOS and {before, ending} in _ALIKE)


def copy_bytes(source: Path, target: Path) -> None:
    """The same bytes; between .nii and .nii.gz the same bytes inside, of a photo the same pixels."""
    before, after = image_ending_of(source), ending_of(target)
    if not is_copyable(source, after):
        raise PclmixError(f"{source}: all images of a dataset need one ending, here {after}; convert it first")
    if before in PHOTOS and after == ".png":
        from PIL import Image

        planes = read_image(source).array[:, 0]
        Image.fromarray(planes[0] if len(planes) == 1 else np.moveaxis(planes, 0, -1)).save(target)
    elif before == after or {before, after} <= {".tif", ".tiff"}:
        shutil.copyfile(source, target)
    elif (before, after) == (".nii", ".nii.gz"):
        with (
            source.open("rb") as plain,
            target.open("wb") as file,
            gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed,
        ):
            shutil.copyfileobj(plain, packed, 1 << 20)
    else:  # from .nii.gz to .nii
        with gzip.open(source, "rb") as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)


def _read_on_grid(source: Path, image: Geometry) -> tuple[npt.NDArray[np.integer[Any]], Geometry]:
    """A label map that lies on the image's grid."""
    array, geometry = read_labels(source)
    # Of a picture file without spacing only the shape can be compared.
    bare = geometry.header is None and geometry.spacing == (1.0, 1.0, 1.0)
    difference = image.same_grid(Geometry(geometry.shape, image.spacing) if bare else geometry)
    if difference:
        raise PclmixError(f"{source} does not fit its image: {difference}; write it again over the image's grid")
    return array, geometry


def merge_strokes(positive: Path, negative: Path, target: Path, image: Geometry) -> None:
    """Write two maps of one class's strokes, drawn where they are not 0, as one: 1, 0, and 2 where nothing is drawn."""
    yes, no = (_read_on_grid(path, image)[0] != 0 for path in (positive, negative))
    both = int((yes & no).sum())
    if both:
        raise PclmixError(f"{positive} and {negative}: {both} pixels are drawn in both; correct one of them")
    _write_on_grid(target, np.where(yes, 1, np.where(no, 0, 2)), image)


def _write_on_grid(target: Path, labels: npt.NDArray[np.integer[Any]], image: Geometry) -> None:
    write_labels(target, labels, image)
    _copy_sidecar(target.with_name(target.name[: -len(ending_of(target))] + ".json"), ending_of(target), image)


def copy_labels(source: Path, target: Path, values: Values, image: Geometry) -> None:
    """Copy a label map on the image's grid with translated values; unchanged files are copied as bytes."""
    target.parent.mkdir(exist_ok=True)
    array, geometry = _read_on_grid(source, image)
    translated = translate(array, values, str(source))
    nifti = geometry.header is not None and ending_of(target).startswith(".nii")
    whole = nifti and geometry.header.get_data_dtype().kind in "iu" and _has_no_slope(geometry)
    if whole and np.array_equal(translated, array):
        copy_bytes(source, target)
        return
    write_labels(target, translated, geometry if nifti else image)
    _copy_sidecar(target.with_name(target.name[: -len(ending_of(target))] + ".json"), ending_of(target), image)


def translate(array: npt.NDArray[np.integer[Any]], values: Values, where: str) -> npt.NDArray[np.int32]:
    """Look every value of (Z, H, W) up in `values`; a value that is not in it is refused."""
    bottom, top = min(values), max(values)
    table = np.full(top - bottom + 1, -1, dtype=np.int32)
    table[np.array(list(values)) - bottom] = list(values.values())
    if bottom <= array.min() and array.max() <= top:
        out = np.stack([table[plane.astype(np.intp) - bottom] for plane in array])
        if out.min() >= 0:
            return out
    unknown = sorted(set(np.unique(array).tolist()) - set(values))
    raise PclmixError(
        f"{where}: label values {listed(unknown)} are not expected; known are {listed(sorted(values))}. "
        "Correct the file, or say what the values mean (--classes, --ignore of `pclmix import folder`)"
    )


def listed(items: Iterable[object], most: int = 5) -> str:
    """`a, b, c` and, when there are more, how many."""
    everything = [str(item) for item in items]
    more = f" and {len(everything) - most} more" if len(everything) > most else ""
    return ", ".join(everything[:most]) + more


def _has_no_slope(geometry: Geometry) -> bool:
    slope, inter = geometry.header.get_slope_inter()
    return slope in (None, 1.0) and inter in (None, 0.0)


def _copy_plain_image(source: Path, target: Path, plane: npt.NDArray[np.generic], geometry: Geometry) -> None:
    """A grey picture saved as RGB becomes one plane, which is what nnU-Net expects of one channel."""
    if read_image(source).array.shape[0] == 3:
        write_image(target, plane, geometry)
    else:
        copy_bytes(source, target)


def _copy_sidecar(target: Path, ending: str, geometry: Geometry) -> None:
    """The spacing of a picture goes into NAME.json, as nnU-Net has it for TIFF; a picture without one is in pixels."""
    if not ending.startswith(".nii") and geometry.unit == "mm":
        write_json(target, {"spacing": list(geometry.spacing)})
