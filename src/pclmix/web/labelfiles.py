"""Label files that other viewers send and get: their values, their names, their place in space.

In such a file 0 is "not drawn", the classes of dataset.json keep their numbers, and the background, which counts from
0 there, follows the last class. A dense mask has no pixel that is not drawn: there 0 is the background.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pclmix.errors import PclmixError, nearest
from pclmix.io.volume import Geometry, ending_of, read_labels
from pclmix.labels import IGNORE, IntArray, Labels

Array = npt.NDArray[Any]
#: The name other viewers see: 3D Slicer's module drops segments that are called `background` in small letters.
BACKGROUND = "Background"
_TOLERANCE = 0.05  # voxels that grids may differ by, for headers are rounded
_TYPES = {
    "uchar": "u1", "unsigned char": "u1", "uint8": "u1", "uint8_t": "u1", "signed char": "i1", "int8": "i1",
    "short": "i2", "int16": "i2", "int16_t": "i2", "ushort": "u2", "unsigned short": "u2", "uint16": "u2",
    "int": "i4", "int32": "i4",
}  # fmt: skip


def names(labels: Labels) -> list[str]:
    """Names in the order of the values in a file, from 1."""
    return [*labels.foreground, BACKGROUND]


def encode(array: IntArray, labels: Labels) -> Array:
    """Strokes (Z, H, W) as the values of a file."""
    if not (array == IGNORE).any():
        return array.astype(np.uint8)
    table = np.array([0, labels.count, *range(1, labels.count)], np.uint8)  # for IGNORE, background, the classes
    found: Array = table[array + 1]
    return found


def decode(values: Array, labels: Labels, named: Sequence[tuple[str, int]], mask: bool) -> IntArray:
    """Values of a file as classes and IGNORE; `named` are the segments that its sender lists, with their numbers."""
    present = [int(v) for v in np.unique(values) if v]
    table = {0: 0 if mask else IGNORE, **_classes(present, labels, named)}
    unknown = [v for v in present if v not in table]
    if unknown:
        way_out = "list the segments in label_info, each with name and idx" if not named else "name each in label_info"
        raise PclmixError(f"the label file holds the value {unknown[0]}, which is no class of this dataset; {way_out}")
    found = np.full(values.shape, IGNORE, np.int16)
    for value, k in table.items():
        found[values == value] = k
    return found


def _classes(present: list[int], labels: Labels, named: Sequence[tuple[str, int]]) -> dict[int, int]:
    """Class by value. 3D Slicer numbers segments among all it has, and values among those it sends: they may differ."""
    if not named:  # the background cannot be told from the value that means "not drawn" in dataset.json
        return {k: k for k in range(1, labels.count)}
    known = {name.lower(): k for k, name in enumerate(labels.names)}
    for name, _ in named:
        if name.strip().lower() not in known:
            raise PclmixError(f"label_info names '{name[:60]}', which is no class.{nearest(name, labels.names)}")
    classes = [(known[name.strip().lower()], idx) for name, idx in sorted(named, key=lambda entry: entry[1])]
    by_number = {idx: k for k, idx in classes}
    by_place = {place: k for place, (k, _) in enumerate(classes, start=1)}
    if len(by_number) < len(classes):
        raise PclmixError("label_info gives one idx to two segments; number them as in the file")
    readings = [table for table in (by_number, by_place) if all(v in table for v in present)]
    if len(readings) == 2 and any(by_number[v] != by_place[v] for v in present):
        raise PclmixError("label_info counts segments that the file may lack; list those of the file alone, from idx 1")
    return readings[0] if readings else by_number


def read_upload(path: Path, geometry: Geometry, most: int) -> tuple[Array, list[tuple[str, int]]]:
    """Values over the grid of the image, (Z, H, W), and the segments that the file itself names.

    NIfTI and NRRD. A file whose axes are permuted or reversed is turned; any other grid is refused.
    """
    if path.name.lower().endswith(".nrrd"):
        voxels, affine, named = _read_nrrd(path, most)
    elif ending_of(path).startswith(".nii"):
        array, own = read_labels(path)
        voxels, affine, named = array.transpose(2, 1, 0), own.affine, []
    else:
        raise PclmixError(f"{path.name}: a label is sent as .nii.gz, .nii, .nrrd or .seg.nrrd")
    header = geometry.header
    grids = [geometry.affine] if header is None else [geometry.affine, header.get_sform(), header.get_qform()]
    for grid in grids:  # other programs may go by the form of the header that is not the best one
        turned = _turned(voxels, affine, grid, geometry.shape[::-1])
        if turned is not None:
            return np.ascontiguousarray(turned.transpose(2, 1, 0)), named
    raise PclmixError("the label lies on another grid than its image; export it with the image as reference geometry")


def _turned(voxels: Array, affine: Array, grid: Array, shape: tuple[int, ...]) -> Array | None:
    """`voxels` (X, Y, Z) with axes permuted and reversed so that they lie on `grid`, or None where they do not."""
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


def _read_nrrd(path: Path, most: int) -> tuple[Array, Array, list[tuple[str, int]]]:
    """Voxels (X, Y, Z), voxel to right-anterior-superior, segments. Only what the file itself holds is read."""
    import nrrd

    try:
        with path.open("rb") as file:
            header = nrrd.read_header(file)
            body = file.read(most + 1)
    except Exception as error:  # a damaged header can make the library raise anything
        raise PclmixError(f"{path.name} cannot be read as NRRD: {error}; export it again") from error
    if {"data file", "datafile"} & {key.lower() for key in header}:
        raise PclmixError(f"{path.name} names another file for its voxels; export it as one file")
    sizes = [int(n) for n in header.get("sizes", ())]
    kind = _TYPES.get(str(header.get("type")))
    if len(sizes) != 3 or min(sizes) < 1 or kind is None:
        raise PclmixError(
            f"{path.name}: one layer of whole numbers in three dimensions is needed; do not let segments overlap"
        )
    dtype = np.dtype(kind).newbyteorder(">" if header.get("endian") == "big" else "<")
    size = int(np.prod(sizes, dtype=object)) * dtype.itemsize
    if size > most or len(body) > most:
        raise PclmixError(f"{path.name} is larger than the workbench takes at once")
    encoding = str(header.get("encoding"))
    try:
        data = body if encoding == "raw" else zlib.decompressobj(31).decompress(body, size)
        if encoding not in ("raw", "gzip", "gz") or len(data) < size:
            raise PclmixError(f"{path.name} is cut off, or packed as {encoding[:20]}; export it again, packed or raw")
        voxels = np.frombuffer(data, dtype, size // dtype.itemsize).reshape(sizes, order="F").astype(np.int64)
        affine = np.eye(4)
        affine[:3, :3] = np.array(header["space directions"], float).T
        affine[:3, 3] = np.array(header["space origin"], float)
    except (zlib.error, KeyError, ValueError, TypeError) as error:
        raise PclmixError(f"{path.name} is damaged or has no place in space ({error}); export it again") from error
    space = str(header.get("space", "")).lower()
    if space in ("left-posterior-superior", "lps"):
        affine = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine
    elif space not in ("right-anterior-superior", "ras"):
        raise PclmixError(f"{path.name}: the space '{space[:40]}' is not known; left-posterior-superior is")
    return voxels, affine, _segments(header)


def _segments(header: dict[str, Any]) -> list[tuple[str, int]]:
    found = []
    for number in range(256):
        if f"Segment{number}_Name" not in header:
            break
        value = str(header.get(f"Segment{number}_LabelValue", number + 1))
        found.append((str(header[f"Segment{number}_Name"]), int(value) if value.isdecimal() else number + 1))
    return found
