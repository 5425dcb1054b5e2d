"""What is in an uploaded file: images, label maps and DICOM files, unpacked under a limit.

Names are made anew from letters, digits and a few signs; folders in a zip are looked at, never followed.
"""

from __future__ import annotations

import errno
import re
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from pclmix.data.dataset import SCRIBBLES
from pclmix.errors import PclmixError
from pclmix.io.volume import ENDINGS, decoded_bytes, ending_of, stem_of
from pclmix.web import series
from pclmix.web.series import Dropped, plain

MiB = 1 << 20
_CHUNK = MiB
_NOT_IMAGES = ("referenceTr", "masks", "predictions")
_WORD = re.compile(r"[^A-Za-z0-9._-]+")


class TooLargeError(PclmixError):
    """An upload, or what is packed in it, goes beyond the limits."""


@dataclass(frozen=True)
class Limits:
    """Bytes of one upload as sent, bytes of everything in it when unpacked, and how many files may be in it."""

    upload: int = 2048 * MiB
    unpacked: int = 8192 * MiB
    files: int = 10_000


@dataclass
class Contents:
    """Files of an upload by what they are: images, label maps by case, DICOM files; `unpacked` bytes in all."""

    images: list[Path] = field(default_factory=list)
    strokes: dict[str, Path] = field(default_factory=dict)
    dicom: list[Dropped] = field(default_factory=list)
    unpacked: int = 0


def clean_name(name: str) -> str:
    """The last part of a name, with nothing in it that a file system or a shell takes for more than a letter."""
    last = PurePosixPath(name.replace("\\", "/")).name
    ending = last[len(stem_of(Path(last))) :] if ending_of(Path(last)) else ""
    clean = _WORD.sub("_", plain(last.removesuffix(ending))).strip("._-") + ending
    if clean == ending or len(clean) > 150:
        raise PclmixError(f"'{name[:60]}' cannot be used as a name; rename the file to a few letters and digits")
    return clean


def unpack(archive: Path, folder: Path, limits: Limits) -> Contents:
    """What a zip holds: images, the label maps among them (those in a folder labelsTr or scribbles), DICOM files.

    Sizes are counted while inflating: what the zip says of itself is not believed.
    """
    found = Contents()
    try:
        with zipfile.ZipFile(archive) as content:
            # A name of dots and slashes alone is a folder, or nothing: it has no last part.
            entries = [e for e in content.infolist() if e.filename.strip("./\\") and not e.is_dir()]
            if len(entries) > limits.files:
                raise TooLargeError(f"the zip holds {len(entries)} files; at most {limits.files} are taken at once")
            for number, entry in enumerate(entries):
                parts = PurePosixPath(entry.filename.replace("\\", "/")).parts
                if any(p.startswith((".", "__MACOSX")) for p in parts[:-1]) or (entry.external_attr >> 28) == 0xA:
                    continue  # a hidden folder or a symbolic link
                if any(part in _NOT_IMAGES for part in parts[:-1]):
                    continue
                if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    # bzip2 and LZMA are inflated by zipfile in one go, a thousand times what was read and more.
                    raise PclmixError(
                        f"the zip is packed in an unusual way ({parts[-1][:60]}); make it again as a plain zip"
                    )
                if ending_of(Path(entry.filename)):
                    _take_image(content, entry, parts, folder, found, limits.unpacked)
                elif _begins_as_dicom(content, entry):
                    target = folder / "dicom" / f"{number:06d}"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    found.unpacked += _inflate(content, entry, target, limits.unpacked - found.unpacked)
                    found.dicom.append(Dropped(target, parts[:-1], parts[-1]))
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PclmixError(f"there is no room to unpack the zip ({error.strerror}); free some space") from error
        raise PclmixError(f"the zip cannot be read ({error}); make it again, without a password") from error
    if not found.images and not found.dicom:
        raise PclmixError(f"the zip holds no images ({', '.join(ENDINGS)}, DICOM)")
    return found


def _take_image(
    content: zipfile.ZipFile, entry: zipfile.ZipInfo, parts: tuple[str, ...], folder: Path, found: Contents, limit: int
) -> None:
    clean = clean_name(entry.filename)
    is_label = any(part in (SCRIBBLES, "scribbles") for part in parts[:-1])
    target = folder / ("labels" if is_label else "images") / clean
    if target.exists():
        raise PclmixError(f"the zip holds two files named {clean}; rename one of them")
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
                raise TooLargeError("the zip unpacks to more than the workbench takes at once; send it in parts")
            file.write(chunk)
    return size


def require_bounded(path: Path, budget: int) -> int:
    """The unpacked size of an image, refused beyond the budget before anything reads it into memory."""
    ending = ending_of(path)
    if ending == ".nii":
        return 0  # what it takes has been counted as it came
    if ending != ".nii.gz":
        try:
            size = decoded_bytes(path)
        except PclmixError:
            return 0  # whoever reads it says what is wrong
        if size > budget:
            raise TooLargeError(f"{path.name} unpacks to more than {budget // MiB} MiB; it was not added")
        return size
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
