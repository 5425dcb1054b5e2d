"""Images dropped on the page: streamed to disk and unpacked under limits, checked, then added to the dataset."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pclmix.data.dataset import IMAGES, SCRIBBLES, read_channels
from pclmix.data.importers.base import copy_bytes, is_copyable
from pclmix.errors import PclmixError
from pclmix.io.files import atomic_path
from pclmix.io.volume import ENDINGS, PHOTOS, Geometry, image_ending_of, read_image, read_labels, stem_of
from pclmix.labels import IGNORE
from pclmix.web import series
from pclmix.web.archives import Contents, Limits, MiB, TooLargeError, clean_name, is_dicom, require_bounded, unpack
from pclmix.web.series import Dropped
from pclmix.web.workspace import Workspace, is_full

_CHANNEL = re.compile(r"^(?P<case>.+)_(?P<channel>\d{4})$")
_ADDING = threading.Lock()  # two uploads at once must not choose the same name


@dataclass
class Added:
    """The result of an upload."""

    cases: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: PclmixError | None = None  #: set if the disk was full

    def refuse(self, name: str, error: PclmixError, *paths: Path) -> None:
        """Record why a case was not added."""
        self.notes.append(_note(name, error, *paths))
        if is_full(error):
            self.failure = error


async def receive(chunks: AsyncIterator[bytes], target: Path, limit: int) -> None:
    """Stream a request body to a file; stop as soon as it exceeds the limit."""
    size = 0
    with target.open("wb") as file:
        async for chunk in chunks:
            size += len(chunk)
            if size > limit:
                raise TooLargeError(f"the upload is larger than {limit // MiB} MiB; increase --max-upload or send less")
            file.write(chunk)


def add(workspace: Workspace, upload: Path, name: str, limits: Limits) -> Added:
    """Add an uploaded image, DICOM file or zip to the dataset."""
    if name.lower().endswith(".zip"):
        found = unpack(upload, upload.parent / "unpacked", limits)
    elif is_dicom(upload):
        found = Contents(dicom=[Dropped(upload, (), name)])
    else:
        clean = clean_name(name)
        if not image_ending_of(Path(clean)):
            known = ", ".join((*ENDINGS, *PHOTOS))
            raise PclmixError(f"{clean}: unknown file ending; drop {known}, DICOM or a .zip of them")
        path = upload.with_name(clean)
        upload.rename(path)
        found = Contents([path], unpacked=require_bounded(path, limits.unpacked))
    return _add_all(workspace, found, upload.with_name("converted"), limits)


def _add_all(workspace: Workspace, found: Contents, folder: Path, limits: Limits) -> Added:
    """Copy complete cases into the dataset; cases that exist already or do not fit are skipped with a note."""
    added = Added()
    scans = series.Converted()
    if found.dicom:
        if not workspace.dataset.ending.startswith(".nii"):
            raise PclmixError(
                f"this dataset contains {workspace.dataset.ending} pictures; DICOM needs a dataset with .nii.gz"
            )
        scans = series.convert(found.dicom, folder, limits.unpacked - found.unpacked)
    with _ADDING:
        _add_images(workspace, found, added)
        for name, path in scans.images.items():
            try:
                case = _free_name(workspace, name, path)
                _add_case(workspace, case, [path], None)
                added.cases.append(case)
            except PclmixError as error:
                added.refuse(name, error, path)
            workspace.refresh()
        workspace.complete()
    added.notes += scans.notes
    if not added.cases:
        more = f"; and {len(added.notes) - 5} more" if len(added.notes) > 5 else ""
        raise PclmixError("; ".join(added.notes[:5]) + more) from added.failure
    return added


def _add_images(workspace: Workspace, found: Contents, added: Added) -> None:
    dataset = workspace.refresh()
    groups: dict[str, dict[int, Path]] = {}
    for path in sorted(found.images):
        match = _CHANNEL.match(stem_of(path))
        case, channel = (match["case"], int(match["channel"])) if match else (stem_of(path), 0)
        groups.setdefault(case, {})[channel] = path
    if not dataset.cases and groups:
        _adopt(workspace, [*groups.values()])
        dataset = workspace.dataset
    for case, channels in groups.items():
        try:
            if case in dataset.cases:
                raise PclmixError("a case of this name exists already; rename the file")
            if sorted(channels) != list(range(len(channels))):
                raise PclmixError(f"its channels are {', '.join(map(str, sorted(channels)))}; 0, 1, ... are needed")
            _add_case(workspace, case, [channels[c] for c in sorted(channels)], found.strokes.get(case))
            added.cases.append(case)
        except PclmixError as error:
            added.refuse(case, error, *channels.values())


def _adopt(workspace: Workspace, groups: list[dict[int, Path]]) -> None:
    """Set file ending and channels of an empty dataset from its first readable image."""
    for channels in groups:
        paths = [channels[number] for number in sorted(channels)]
        try:
            volume = read_image(paths[0])
        except PclmixError:
            continue  # reported when it is added
        count = len(volume.array)
        if count == 3 and bool((volume.array == volume.array[:1]).all()):
            count = 1  # greyscale saved as RGB
        workspace.adopt(_stored_as(paths[0]), count * len(paths))
        return


def _stored_as(path: Path) -> str:
    """The ending of an image in a dataset: compressed NIfTI, and PNG for a photo, whose pixels are kept."""
    ending = image_ending_of(path)
    return ".png" if ending in PHOTOS else ".nii.gz" if ending == ".nii" else ending


def _note(case: str, error: PclmixError, *paths: Path) -> str:
    """Why a case was not added, without the temporary folder in the message."""
    said = str(error)
    for path in paths:
        said = said.replace(f"{path.parent}/", "")
    return said if said.startswith(case) else f"{case}: {said}"


def _free_name(workspace: Workspace, name: str, path: Path) -> str:
    """`name`, or name_2, ...: folders of scans often have the same name. The same scan twice is refused."""
    dataset, number, free = workspace.refresh(), 1, name
    while free in dataset.cases:
        if _same_image(workspace.image_paths(free)[0], path):
            raise PclmixError(f"this scan exists already as {free}")
        number += 1
        free = f"{name}_{number}"
    return free


def _same_image(one: Path, other: Path) -> bool:
    try:
        first, second = read_image(one), read_image(other)
    except PclmixError:
        return False
    return not first.geometry.same_grid(second.geometry) and np.array_equal(first.array, second.array)


def _add_case(workspace: Workspace, case: str, images: list[Path], stroke: Path | None) -> None:
    dataset = workspace.dataset
    for path in images:
        if not is_copyable(path, dataset.ending):  # before decoding
            raise PclmixError(f"{path}: this dataset contains {dataset.ending} images; convert it first")
    geometry = read_channels(images, len(dataset.channels)).geometry
    array = np.full(geometry.shape, IGNORE, np.int16) if stroke is None else _strokes(workspace, stroke, geometry)
    label = workspace.inside(dataset.root / SCRIBBLES / f"{case}{dataset.ending}")
    targets = [workspace.inside(dataset.root / IMAGES / f"{case}_{c:04d}{dataset.ending}") for c in range(len(images))]
    for target in (label, *targets):  # also on file systems that ignore case
        if target.exists():
            raise PclmixError(f"{target.name} exists already; rename the file")
    try:
        for path, target in zip(images, targets, strict=True):
            with atomic_path(target) as temporary:
                copy_bytes(path, temporary)
        workspace.add_labels(label, array, geometry)
    except (PclmixError, OSError):
        for path in targets:
            path.unlink(missing_ok=True)
        raise


def _strokes(workspace: Workspace, path: Path, image: Geometry) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
    array, geometry = read_labels(path)
    difference = image.same_grid(geometry)
    if difference:
        raise PclmixError(f"its label map does not fit the image: {difference}")
    return workspace.dataset.labels.decode(array, path.name)
