"""Images that a user drops on the page: streamed to disk under a limit, unpacked under a limit, checked, then added.

Names are made anew from letters, digits and a few signs; folders in a zip are looked at, never followed.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from pclmix.data.dataset import IMAGES, SCRIBBLES, read_channels
from pclmix.data.importers.base import copy_bytes
from pclmix.data.volume import ENDINGS, Geometry, ending_of, read_labels, stem_of, write_labels
from pclmix.errors import PclmixError
from pclmix.labels import IGNORE
from pclmix.web.workspace import Workspace

MiB = 1 << 20
_CHUNK = MiB
_FILES = 5000  # in one zip
_CHANNEL = re.compile(r"^(?P<case>.+)_(?P<channel>\d{4})$")
_WORD = re.compile(r"[^A-Za-z0-9._-]+")


class TooLargeError(PclmixError):
    """An upload, or what is packed in it, goes beyond the limits."""


@dataclass(frozen=True)
class Limits:
    """Bytes of one upload as sent, and of everything in it when unpacked."""

    upload: int = 2048 * MiB
    unpacked: int = 8192 * MiB


@dataclass
class Added:
    """What became of an upload."""

    cases: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


async def receive(chunks: AsyncIterator[bytes], target: Path, limit: int) -> None:
    """Write a request's body to a file, giving up as soon as it is larger than the limit."""
    size = 0
    with target.open("wb") as file:
        async for chunk in chunks:
            size += len(chunk)
            if size > limit:
                raise TooLargeError(f"the upload is larger than {limit // MiB} MiB; raise --max-upload or send less")
            file.write(chunk)


@contextmanager
def incoming(workspace: Workspace) -> Iterator[Path]:
    """An empty folder inside the dataset that is gone afterwards."""
    top = workspace.corner("incoming")
    top.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=top))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clean_name(name: str) -> str:
    """The last part of a name, with nothing in it that a file system or a shell takes for more than a letter."""
    last = PurePosixPath(name.replace("\\", "/")).name
    ending = last[len(stem_of(Path(last))) :] if ending_of(Path(last)) else ""
    clean = _WORD.sub("_", last.removesuffix(ending)).strip("._-") + ending
    if clean == ending or len(clean) > 150:
        raise PclmixError(f"'{name[:60]}' cannot be used as a name; rename the file to a few letters and digits")
    return clean


def add(workspace: Workspace, upload: Path, name: str, limits: Limits) -> Added:
    """Add one uploaded file, an image or a zip of images, to the dataset."""
    if name.lower().endswith(".zip"):
        folder = upload.parent / "unpacked"
        images, strokes = unpack(upload, folder, limits)
    else:
        clean = clean_name(name)
        if not ending_of(Path(clean)):
            raise PclmixError(f"{clean}: unknown file ending; drop {', '.join(ENDINGS)} or a .zip of them")
        path = upload.with_name(clean)
        upload.rename(path)
        _require_bounded(path, limits.unpacked)
        images, strokes = [path], {}
    return _add_cases(workspace, images, strokes)


def unpack(archive: Path, folder: Path, limits: Limits) -> tuple[list[Path], dict[str, Path]]:
    """Images of a zip, and the label maps among them (those in a folder labelsTr or scribbles) by case.

    Sizes are counted while inflating: what the zip says of itself is not believed.
    """
    budget = limits.unpacked
    images: list[Path] = []
    strokes: dict[str, Path] = {}
    try:
        with zipfile.ZipFile(archive) as content:
            entries = [e for e in content.infolist() if not e.is_dir() and ending_of(Path(e.filename))]
            if len(entries) > _FILES:
                raise TooLargeError(f"the zip holds {len(entries)} files; at most {_FILES} are unpacked at once")
            for entry in entries:
                parents = PurePosixPath(entry.filename.replace("\\", "/")).parts[:-1]
                clean = clean_name(entry.filename)
                if any(part.startswith((".", "__MACOSX")) for part in parents) or (entry.external_attr >> 28) == 0xA:
                    continue  # a hidden folder or a symbolic link
                is_label = any(part in (SCRIBBLES, "scribbles") for part in parents)
                if any(part in ("referenceTr", "masks", "predictions") for part in parents):
                    continue
                target = folder / ("labels" if is_label else "images") / clean
                if target.exists():
                    raise PclmixError(f"the zip holds two files named {clean}; rename one of them")
                target.parent.mkdir(parents=True, exist_ok=True)
                budget -= _inflate(content, entry, target, budget)
                budget -= _require_bounded(target, budget)
                if is_label:
                    strokes[stem_of(target)] = target
                else:
                    images.append(target)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise PclmixError(f"the zip cannot be read ({error}); make it again, without a password") from error
    if not images:
        raise PclmixError(f"the zip holds no images ({', '.join(ENDINGS)})")
    return images, strokes


def _inflate(content: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path, budget: int) -> int:
    size = 0
    with content.open(entry) as source, target.open("wb") as file:
        while chunk := source.read(_CHUNK):
            size += len(chunk)
            if size > budget:
                raise TooLargeError("the zip unpacks to more than the workbench takes at once; send it in parts")
            file.write(chunk)
    return size


def _require_bounded(path: Path, budget: int) -> int:
    """The unpacked size of a .gz, refused beyond the budget before anything reads it into memory; else 0."""
    if ending_of(path) != ".nii.gz":
        return 0
    size = 0
    inflater = zlib.decompressobj(wbits=31)
    with path.open("rb") as file:
        try:
            while data := file.read(_CHUNK):
                while data:
                    size += len(inflater.decompress(data, _CHUNK))
                    if size > budget:
                        raise TooLargeError(f"{path.name} unpacks to more than {budget // MiB} MiB; it was not added")
                    data = inflater.unconsumed_tail
                    if inflater.eof:
                        data = inflater.unused_data
                        inflater = zlib.decompressobj(wbits=31)
        except zlib.error as error:
            raise PclmixError(
                f"{path.name} is truncated or damaged ({error}); copy it again from its source"
            ) from error
    return size


def _add_cases(workspace: Workspace, images: list[Path], strokes: dict[str, Path]) -> Added:
    """Copy whole cases into the dataset; one that exists or does not fit is left out with a note."""
    added = Added()
    dataset = workspace.refresh()
    groups: dict[str, dict[int, Path]] = {}
    for path in sorted(images):
        match = _CHANNEL.match(stem_of(path))
        case, channel = (match["case"], int(match["channel"])) if match else (stem_of(path), 0)
        groups.setdefault(case, {})[channel] = path
    for case, found in groups.items():
        try:
            if case in dataset.cases:
                raise PclmixError("a case of this name is there already; rename the file")
            if sorted(found) != list(range(len(found))):
                raise PclmixError(f"its channels are {', '.join(map(str, sorted(found)))}; 0, 1, ... are needed")
            _add_case(workspace, case, [found[c] for c in sorted(found)], strokes.get(case))
            added.cases.append(case)
        except PclmixError as error:
            added.notes.append(f"{case}: {error}")
    workspace.complete()
    if not added.cases:
        raise PclmixError("; ".join(added.notes[:5]))
    return added


def _add_case(workspace: Workspace, case: str, images: list[Path], stroke: Path | None) -> None:
    dataset = workspace.dataset
    geometry = read_channels(images, len(dataset.channels)).geometry
    array = np.full(geometry.shape, IGNORE, np.int16) if stroke is None else _strokes(workspace, stroke, geometry)
    label = workspace.inside(dataset.root / SCRIBBLES / f"{case}{dataset.ending}")
    written = [label]
    try:
        label.parent.mkdir(exist_ok=True)
        write_labels(label, dataset.labels.encode(array), geometry, dataset.labels.names)
        for channel, path in enumerate(images):
            target = workspace.inside(dataset.root / IMAGES / f"{case}_{channel:04d}{dataset.ending}")
            written.append(target)
            target.parent.mkdir(exist_ok=True)
            copy_bytes(path, target)
    except (PclmixError, OSError):
        for path in written:
            path.unlink(missing_ok=True)
        raise


def _strokes(workspace: Workspace, path: Path, image: Geometry) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
    array, geometry = read_labels(path)
    difference = image.same_grid(geometry)
    if difference:
        raise PclmixError(f"its label map does not fit the image: {difference}")
    return workspace.dataset.labels.decode(array, path.name)
