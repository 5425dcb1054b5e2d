"""Label files exchanged with other viewers: values, segment names, geometry.

In a stroke file, 0 means "not drawn", classes keep their numbers from dataset.json, and the background, which is 0 in
dataset.json, gets the number after the last class. In a dense mask, 0 is the background.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from pclmix.errors import PclmixError, nearest
from pclmix.io.volume import Geometry, ending_of, read_labels
from pclmix.labels import IGNORE, IntArray, Labels

Array = npt.NDArray[Any]
#: Segment name in files: the module of 3D Slicer drops segments named `background` in lower case.
BACKGROUND = "Background"
_OTHER_GRID = "has another grid than its image; export it with the image as reference geometry"
_HEADER = 1 << 20  # bytes of an NRRD header
_TOLERANCE = 0.05  # voxels by which grids may differ, since headers are rounded
_TYPES = {
    "uchar": "u1", "unsigned char": "u1", "uint8": "u1", "uint8_t": "u1", "signed char": "i1", "int8": "i1",
    "short": "i2", "int16": "i2", "int16_t": "i2", "ushort": "u2", "unsigned short": "u2", "uint16": "u2",
    "int": "i4", "int32": "i4",
}  # fmt: skip


def names(labels: Labels) -> list[str]:
    """Segment names in the order of the file values, from 1."""
    return [*labels.foreground, BACKGROUND]


def encode(array: IntArray, labels: Labels) -> Array:
    """Strokes (Z, H, W) as file values."""
    if not (array == IGNORE).any():
        return array.astype(np.uint8)
    table = np.array([0, labels.count, *range(1, labels.count)], np.uint8)  # for IGNORE, background, the classes
    found: Array = table[array + 1]
    return found


def decode(values: Array, labels: Labels, named: Sequence[tuple[str, int]], mask: bool) -> IntArray:
    """File values as classes and IGNORE; `named` are the segments listed by the sender, with their values."""
    present = [int(v) for v in np.unique(values) if v]
    table = {0: 0 if mask else IGNORE, **_classes(present, labels, named)}
    unknown = [v for v in present if v not in table]
    if unknown:
        way_out = "list the segments in label_info, each with name and idx" if not named else "name each in label_info"
        raise PclmixError(
            f"the label file contains the value {unknown[0]}, which is no class of this dataset; {way_out}"
        )
    found = np.full(values.shape, IGNORE, np.int16)
    for value, k in table.items():
        found[values == value] = k
    return found


def _classes(present: list[int], labels: Labels, named: Sequence[tuple[str, int]]) -> dict[int, int]:
    """Class by value. 3D Slicer numbers label_info over all segments but values over those sent: they may differ."""
    if not named:  # the value of the background in dataset.json, 0, means "not drawn" in the file
        return {k: k for k in range(1, labels.count)}
    known = {name.lower(): k for k, name in enumerate(labels.names)}
    for name, _ in named:
        if name.strip().lower() not in known:
            raise PclmixError(f"label_info names '{name[:60]}', which is no class.{nearest(name, labels.names)}")
    classes = [(known[name.strip().lower()], idx) for name, idx in sorted(named, key=lambda entry: entry[1])]
    by_number = {idx: k for k, idx in classes}
    by_place = {place: k for place, (k, _) in enumerate(classes, start=1)}
    if len(by_number) < len(classes):
        raise PclmixError("two segments in label_info have the same idx; use the values of the file")
    readings = [table for table in (by_number, by_place) if all(v in table for v in present)]
    if len(readings) == 2 and any(by_number[v] != by_place[v] for v in present):
        raise PclmixError(
            "label_info lists segments that may not be in the file; list only those in the file, from idx 1"
        )
    return readings[0] if readings else by_number


def read_upload(path: Path, geometry: Geometry, most: int) -> tuple[Array, list[tuple[str, int]]]:
    """Values on the grid of the image, (Z, H, W), and the segments named in the file itself.

    Reads NIfTI and NRRD. Permuted or reversed axes are reordered; any other grid is refused.
    """
    if path.name.lower().endswith(".nrrd"):
        voxels, affine, named = _read_nrrd(path, most, geometry.shape)
    elif ending_of(path).startswith(".nii"):
        array, own = read_labels(path)
        voxels, affine, named = array.transpose(2, 1, 0), own.affine, []
    else:
        raise PclmixError(f"{path.name}: not a label file; send .nii.gz, .nii, .nrrd or .seg.nrrd")
    header = geometry.header
    grids = [geometry.affine] if header is None else [geometry.affine, header.get_sform(), header.get_qform()]
    for grid in grids:  # other programs may use either sform or qform
        turned = _turned(voxels, affine, grid, geometry.shape[::-1])
        if turned is not None:
            return np.ascontiguousarray(turned.transpose(2, 1, 0)), named
    raise PclmixError(f"the label {_OTHER_GRID}")


def _turned(voxels: Array, affine: Array, grid: Array, shape: tuple[int, ...]) -> Array | None:
    """`voxels` (X, Y, Z) with axes permuted and reversed to match `grid`, or None if impossible."""
    try:
        change = np.linalg.inv(grid) @ affine  # from voxels of the label to voxels of the image
    except np.linalg.LinAlgError:
        return None
    if not np.isfinite(change).all():
        return None
    turn = np.rint(change[:3, :3])
    if np.abs(turn).sum(0).tolist() != [1, 1, 1] or np.abs(turn).sum(1).tolist() != [1, 1, 1]:
        return None
    axes = np.abs(turn).argmax(axis=1).tolist()
    turned = voxels.transpose(axes)
    if turned.shape != shape:
        return None
    ideal = np.zeros((3, 4))
    ideal[:, :3] = turn
    for i, axis in enumerate(axes):
        if turn[i, axis] < 0:
            turned, ideal[i, 3] = np.flip(turned, i), shape[i] - 1
    ends = np.array([[x, y, z, 1] for x in (0, 1) for y in (0, 1) for z in (0, 1)], float).T
    ends[:3] *= np.array(voxels.shape)[:, None] - 1
    off = np.abs((change[:3] - ideal) @ ends).max()
    return turned if off <= _TOLERANCE * max(1.0, max(shape) / 100) else None


def _read_nrrd(path: Path, most: int, shape: tuple[int, ...]) -> tuple[Array, Array, list[tuple[str, int]]]:
    """Voxels (X, Y, Z), voxel-to-RAS affine, segments. External data files are not followed.

    Voxels are read only if there are as many as in `shape`, in any order of the axes: a small file can hold gigabytes.
    """
    import nrrd

    try:
        with path.open("rb") as file:
            if not _has_short_header(file):
                raise ValueError(f"its header is longer than {_HEADER >> 20} MiB")
            header = nrrd.read_header(file)
            segments = _segments(header)
            body = file.read(most + 1)
    except Exception as error:  # pynrrd raises arbitrary exceptions on damaged headers
        raise PclmixError(f"{path.name} cannot be read as NRRD: {error}; export it again") from error
    if {"data file", "datafile"} & {key.lower() for key in header}:
        raise PclmixError(f"{path.name} has its voxels in another file; export it as one file")
    sizes = [int(n) for n in header.get("sizes", ())]
    kind = _TYPES.get(str(header.get("type")))
    if len(sizes) != 3 or min(sizes) < 1 or kind is None:
        raise PclmixError(f"{path.name}: needs a single 3-D layer of integers; export without overlapping segments")
    if sorted(sizes) != sorted(shape):
        raise PclmixError(f"{path.name} {_OTHER_GRID}")
    dtype = np.dtype(kind).newbyteorder(">" if header.get("endian") == "big" else "<")
    size = int(np.prod(sizes, dtype=object)) * dtype.itemsize
    if size > most or len(body) > most:
        raise PclmixError(f"{path.name} exceeds the size limit (--max-upload)")
    encoding = str(header.get("encoding"))
    try:
        data = body if encoding == "raw" else zlib.decompressobj(31).decompress(body, size)
        if encoding not in ("raw", "gzip", "gz") or len(data) < size:
            raise PclmixError(
                f"{path.name} is truncated or not in raw or gzip encoding ({encoding[:20]}); export it again"
            )
        voxels = np.frombuffer(data, dtype, size // dtype.itemsize).reshape(sizes, order="F")
        affine = np.eye(4)
        affine[:3, :3] = np.array(header["space directions"], float).T
        affine[:3, 3] = np.array(header["space origin"], float)
    except (zlib.error, KeyError, ValueError, TypeError) as error:
        raise PclmixError(f"{path.name} is damaged or has no geometry ({error}); export it again") from error
    space = str(header.get("space", "")).lower()
    if space in ("left-posterior-superior", "lps"):
        affine = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine
    elif space not in ("right-anterior-superior", "ras"):
        raise PclmixError(f"{path.name}: the space '{space[:40]}' is not supported; use left-posterior-superior")
    return voxels, affine, segments


def _has_short_header(file: IO[bytes]) -> bool:
    """Whether the header, which ends with an empty line, has at most `_HEADER` bytes."""
    start = file.read(_HEADER)
    file.seek(0)
    return len(start) < _HEADER or b"\n\n" in start or b"\r\n\r\n" in start


def _segments(header: dict[str, Any]) -> list[tuple[str, int]]:
    found = []
    for number in range(256):
        if f"Segment{number}_Name" not in header:
            break
        value = str(header.get(f"Segment{number}_LabelValue", number + 1))
        found.append((str(header[f"Segment{number}_Name"]), int(value) if value.isdecimal() else number + 1))
    return found
