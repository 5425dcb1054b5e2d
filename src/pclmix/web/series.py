"""Dropped DICOM files sorted into series, each converted to one NIfTI file. Needs the extra `dicom`.

Case names come from the names of the dropped folders, plus number and description of the series if a folder contains
several. Names of patients are never used.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pclmix.errors import PclmixError
from pclmix.io.dicom import convert_series, read_file

NEEDED = (
    "DICOM needs the extra 'dicom': pip install '.[dicom]' in a clone of pclmix, or pip install pydicom highdicom; "
    "then start the workbench again"
)
MAGIC_END = 132  #: the magic DICM ends at this byte
_LONGEST = 80
_WORD = re.compile(r"[^A-Za-z0-9-]+")


@dataclass(frozen=True)
class Dropped:
    """A DICOM file on disk, with its original folders and name."""

    path: Path
    folders: tuple[str, ...]
    name: str


@dataclass
class Found:
    """The files of one series, its number and description, and the size of its pixels in bytes."""

    number: str
    description: str
    files: list[Dropped] = field(default_factory=list)
    size: int = 0

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders common to all files."""
        common = []
        for parts in zip(*(file.folders for file in self.files), strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        return tuple(common)


@dataclass
class Converted:
    """NIfTI files by case name, and a note for each series or file that could not be converted."""

    images: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def is_available() -> bool:
    return find_spec("pydicom") is not None


def is_dicom(start: bytes) -> bool:
    return start[128:MAGIC_END] == b"DICM"


def convert(files: Sequence[Dropped], folder: Path, budget: int) -> Converted:
    """Write each series to `folder` as NIfTI; unreadable series and series above `budget` bytes get a note."""
    if not is_available():
        raise PclmixError(NEEDED)
    done = Converted()
    series = _sort(files, done.notes)
    for number, (name, found) in enumerate(zip(names(series), series, strict=True)):
        place = folder / f"series{number}"
        try:
            if found.size > budget:
                raise PclmixError("its pixels exceed the size limit (--max-upload); add it alone")
            _gather(found, place)
            target = folder / f"{number}.nii.gz"
            convert_series(place, target)
            budget -= found.size
            done.images[name] = target
        except Exception as error:  # an unforeseen header must not fail the other series
            said = str(error).replace(f"{place}/", "").removeprefix(f"{place}:").replace(str(place), "it").strip()
            done.notes.append(f"{name}: {said}")
    return done


def names(series: Sequence[Found]) -> list[str]:
    """Unique names, one per series: the last folder, all folders, or folders with number and description."""
    last = [_word(*found.folders[-1:]) for found in series]
    whole = [_word(*found.folders) for found in series]
    own = [_word(*found.folders, found.number, found.description) for found in series]
    for candidates in (last, whole):
        if all(candidates) and len(set(candidates)) == len(candidates):
            return candidates
    chosen: list[str] = []
    for name in own:
        free, number = name or "series", 1
        while free in chosen:
            number += 1
            free = f"{name or 'series'}_{number}"
        chosen.append(free)
    return chosen


def _sort(files: Sequence[Dropped], notes: list[str]) -> list[Found]:
    """Files grouped by series, ordered by folder; files without pixels are skipped."""
    found: dict[str, Found] = {}
    bad: list[str] = []
    for file in sorted(files, key=lambda f: (f.folders, f.name)):
        try:
            head = read_file(file.path, pixels=False)
            uid, size = str(head.get("SeriesInstanceUID", "")), _pixel_bytes(head)
            if not uid and "DirectoryRecordSequence" not in head:
                raise PclmixError("it has no SeriesInstanceUID")
            number, words = str(head.get("SeriesNumber") or ""), str(head.get("SeriesDescription") or "")
        except Exception as error:  # pydicom raises arbitrary exceptions on damaged files
            bad.append(f"{_shown(file.name)}: {error}")
            continue
        if not size or not uid:
            continue  # DICOMDIR, reports, contours
        entry = found.setdefault(uid, Found(number, words))
        entry.files.append(file)
        entry.size += size
    if bad:
        notes.append(f"{len(bad)} DICOM file{'s' * (len(bad) > 1)} cannot be read, such as {bad[0][:200]}")
    if not found and not bad:
        notes.append("the DICOM files contain no image")
    return list(found.values())


def _pixel_bytes(head: Any) -> int:
    """Upper bound of the memory for the pixels: four bytes each once rescaled; 0 without an image."""
    count = int(head.get("Rows") or 0) * int(head.get("Columns") or 0) * int(head.get("SamplesPerPixel") or 1)
    return 4 * count * max(1, int(head.get("NumberOfFrames") or 1))  # a negative count must not raise the budget


def _gather(found: Found, place: Path) -> None:
    """Move the files of a series into their own folder, under safe names."""
    place.mkdir(parents=True)
    for number, file in enumerate(found.files):
        name = target = place / _shown(file.name)
        while target.exists():  # same name in another folder: rename would replace it
            target = name.with_name(f"{number}_{target.name}")
        file.path.rename(target)


def plain(text: str) -> str:
    """Remove accents: été becomes ete."""
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def _shown(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", plain(name))[-_LONGEST:].lstrip("._-") or "file"


def _word(*parts: str) -> str:
    """Join parts to a case name without dots, which would start a file ending, and of limited length."""
    words = (_WORD.sub("_", plain(part)).strip("_-") for part in parts)
    return "_".join(word for word in words if word)[:_LONGEST].strip("_-")
