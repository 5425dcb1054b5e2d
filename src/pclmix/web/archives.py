"""Zip files: uploads unpacked under size limits, the dataset and its predictions streamed as downloads."""

from __future__ import annotations

import errno
import io
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from pclmix.data.dataset import IMAGES, REFERENCE, SCRIBBLES, SPLITS
from pclmix.errors import PclmixError
from pclmix.io.volume import ENDINGS, PHOTOS, decoded_bytes, image_ending_of, stem_of
from pclmix.web import series
from pclmix.web.series import Dropped, plain
from pclmix.web.workspace import OutsideError, PredictionStore, Workspace

MiB = 1 << 20
_CHUNK = MiB
_NOT_IMAGES = ("referenceTr", "masks", "predictions")
_WORD = re.compile(r"[^A-Za-z0-9._-]+")


class TooLargeError(PclmixError):
    """An upload, or its unpacked content, exceeds the limits."""


@dataclass(frozen=True)
class Limits:
    """Limits of one upload: bytes as sent, bytes unpacked, number of files in a zip."""

    upload: int = 2048 * MiB
    unpacked: int = 8192 * MiB
    files: int = 10_000


@dataclass
class Contents:
    """Files of an upload by kind: images, label maps by case, DICOM files; `unpacked` counts bytes."""

    images: list[Path] = field(default_factory=list)
    strokes: dict[str, Path] = field(default_factory=dict)
    dicom: list[Dropped] = field(default_factory=list)
    unpacked: int = 0


def clean_name(name: str) -> str:
    """The base name, reduced to characters that are safe in file systems and shells."""
    last = PurePosixPath(name.replace("\\", "/")).name
    ending = last[len(stem_of(Path(last))) :] if image_ending_of(Path(last)) else ""
    clean = _WORD.sub("_", plain(last.removesuffix(ending))).strip("._-") + ending
    if clean == ending or len(clean) > 150:
        raise PclmixError(f"'{name[:60]}' cannot be used as a file name; use letters and digits")
    return clean


def unpack(archive: Path, folder: Path, limits: Limits) -> Contents:
    """Extract images, label maps (files in a folder labelsTr or scribbles) and DICOM files from a zip.

    File names are made anew; paths in the zip are never followed. Sizes are counted while inflating: the sizes declared
    in the zip are not trusted.
    """
    found = Contents()
    try:
        with zipfile.ZipFile(archive) as content:
            # A name of dots and slashes only has no base name.
            entries = [e for e in content.infolist() if e.filename.strip("./\\") and not e.is_dir()]
            if len(entries) > limits.files:
                raise TooLargeError(
                    f"the zip contains {len(entries)} files; at most {limits.files} are accepted at once"
                )
            for number, entry in enumerate(entries):
                parts = PurePosixPath(entry.filename.replace("\\", "/")).parts
                if any(p.startswith((".", "__MACOSX")) for p in parts[:-1]) or (entry.external_attr >> 28) == 0xA:
                    continue  # a hidden folder or a symbolic link
                if any(part in _NOT_IMAGES for part in parts[:-1]):
                    continue
                if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    # zipfile inflates bzip2 and LZMA in one go, a thousandfold and more.
                    raise PclmixError(
                        f"the zip uses an unsupported compression ({parts[-1][:60]}); create it again with deflate"
                    )
                if image_ending_of(Path(entry.filename)):
                    _take_image(content, entry, parts, folder, found, limits.unpacked)
                elif _begins_as_dicom(content, entry):
                    target = folder / "dicom" / f"{number:06d}"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    found.unpacked += _inflate(content, entry, target, limits.unpacked - found.unpacked)
                    found.dicom.append(Dropped(target, parts[:-1], parts[-1]))
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PclmixError(f"no space left to unpack the zip ({error.strerror}); free some space") from error
        raise PclmixError(f"the zip cannot be read ({error}); create it again, without a password") from error
    if not found.images and not found.dicom:
        raise PclmixError(f"the zip contains no images ({', '.join((*ENDINGS, *PHOTOS))}, DICOM)")
    return found


def _take_image(
    content: zipfile.ZipFile, entry: zipfile.ZipInfo, parts: tuple[str, ...], folder: Path, found: Contents, limit: int
) -> None:
    clean = clean_name(entry.filename)
    is_label = any(part in (SCRIBBLES, "scribbles") for part in parts[:-1])
    target = folder / ("labels" if is_label else "images") / clean
    if target.exists():
        raise PclmixError(f"the zip contains two files named {clean}; rename one of them")
    target.parent.mkdir(parents=True, exist_ok=True)
    found.unpacked += _inflate(content, entry, target, limit - found.unpacked)
    found.unpacked += require_bounded(target, limit - found.unpacked)
    if is_label:
        found.strokes[stem_of(target)] = target
    else:
        found.images.append(target)


def _begins_as_dicom(content: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool:
    with content.open(entry) as source:
        return series.is_dicom(source.read(series.MAGIC_END))


def is_dicom(path: Path) -> bool:
    with path.open("rb") as file:
        return series.is_dicom(file.read(series.MAGIC_END))


def _inflate(content: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path, budget: int) -> int:
    size = 0
    with content.open(entry) as source, target.open("wb") as file:
        while chunk := source.read(_CHUNK):
            size += len(chunk)
            if size > budget:
                raise TooLargeError("the unpacked zip exceeds the limit (--max-upload); send it in parts")
            file.write(chunk)
    return size


def require_bounded(path: Path, budget: int) -> int:
    """The unpacked size of an image; refused above the budget before anything is read into memory."""
    ending = image_ending_of(path)
    if ending == ".nii":
        return 0  # not compressed: counted while received
    if ending != ".nii.gz":
        try:
            size = decoded_bytes(path)
        except PclmixError:
            return 0  # the reader reports what is wrong
        if size > budget:
            raise TooLargeError(f"{path.name} is larger than {budget // MiB} MiB unpacked; it was not added")
        return size
    size = 0
    inflater = zlib.decompressobj(wbits=31)
    with path.open("rb") as file:
        try:
            while data := file.read(_CHUNK):
                while data:
                    size += len(inflater.decompress(data, _CHUNK))
                    if size > budget:
                        raise TooLargeError(
                            f"{path.name} is larger than {budget // MiB} MiB unpacked; it was not added"
                        )
                    data = inflater.unconsumed_tail
                    if inflater.eof:
                        data = inflater.unused_data
                        inflater = zlib.decompressobj(wbits=31)
        except zlib.error as error:
            raise PclmixError(
                f"{path.name} is truncated or damaged ({error}); copy it again from its source"
            ) from error
    return size


class _Pipe(io.RawIOBase):
    """A write-only buffer: zipfile writes into it, `take` empties it."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        piece = bytes(data)  # type: ignore[call-overload]
        self.pieces.append(piece)
        return len(piece)

    def take(self) -> bytes:
        taken, self.pieces = b"".join(self.pieces), []
        return taken


def dataset_files(workspace: Workspace) -> list[tuple[Path, str]]:
    """Files of the dataset with their names in the zip; links out of the dataset are skipped."""
    root = workspace.root
    top = [root / name for name in ("dataset.json", SPLITS)]
    below = [p for name in (IMAGES, SCRIBBLES, REFERENCE) for p in sorted((root / name).glob("[!.]*"))]
    return [(p, p.relative_to(root).as_posix()) for p in (*top, *below) if _is_ours(workspace, p)]


def prediction_files(workspace: Workspace) -> list[tuple[Path, str]]:
    """The newest prediction of each case with its name in the zip."""
    book = PredictionStore(workspace)
    found = []
    for case in workspace.refresh().cases:
        known = book.of(case)
        if known:
            path = book.folder(str(known[0]["run"])) / f"{case}.nii.gz"
            if _is_ours(workspace, path):
                found.append((path, f"predictions/{path.name}"))
    return found


def stream_zip(files: list[tuple[Path, str]], texts: dict[str, str] | None = None) -> Iterator[bytes]:
    """Stream a zip of files and texts, uncompressed: images are compressed already. Nothing is held in memory."""
    pipe = _Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_STORED) as archive:
        for name, text in (texts or {}).items():
            archive.writestr(name, text)
            yield pipe.take()
        for path, name in files:
            entry = zipfile.ZipInfo.from_file(path, name)
            with path.open("rb") as source, archive.open(entry, "w", force_zip64=True) as target:
                while chunk := source.read(_CHUNK):
                    target.write(chunk)
                    yield pipe.take()
            yield pipe.take()
    yield pipe.take()


def _is_ours(workspace: Workspace, path: Path) -> bool:
    try:
        return workspace.inside(path).is_file()
    except OutsideError:
        return False
