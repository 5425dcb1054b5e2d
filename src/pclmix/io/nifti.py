"""NIfTI 1 and 2 on disk: read into one array of the size that the header says, written with the header as it was."""

from __future__ import annotations

import gzip
import math
import struct
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

from pclmix.errors import PclmixError
from pclmix.io.limits import require_size

Array = npt.NDArray[Any]

_UNITS_IN_MM = {"meter": 1000.0, "mm": 1.0, "micron": 0.001, "unknown": 1.0}
_CHUNK = 4 << 20
_EXTENSIONS = 16 << 20  # bytes of header extensions, and of what may follow the voxels


def read_nifti(path: Path, content: bytes | None = None) -> tuple[Array, tuple[float, float, float], Any]:
    """Voxels (1, Z, H, W), spacing (Z, H, W) in mm and the header. Memory is that of the voxels, and little more.

    A .gz is read to its end, so that its checksum is verified. `content` is the file's, where it has been read.
    """
    size = path.stat().st_size if content is None else len(content)
    if size == 0:
        raise PclmixError(f"{path} is an empty file; copy it again from its source")
    with closing(_open(path, content)) as file:
        header = _read_header(file)
        shape = _shape(path, header)
        stored = header.get_data_dtype()
        slope, inter = header.get_slope_inter()
        scaled = slope is not None and (slope, inter) != (1.0, 0.0)
        count = math.prod(shape)
        require_size(path, count * max(stored.itemsize, 8 if scaled else 0))
        if not _is_packed(path) and size < header.get_data_offset() + count * stored.itemsize:
            raise EOFError(f"{count} voxels are announced, the file ends before")
        raw = np.empty(count * stored.itemsize, np.uint8)
        _fill(file, raw)
        _read_to_end(path, file)
    x, y, z = shape
    array = raw.view(stored).reshape(1, z, y, x)  # stored (X, Y, Z) with X fastest: the transpose without a copy
    if scaled:
        array = array * np.float64(slope) + np.float64(inter)
    header.get_best_affine()  # raises where the header describes no space at all
    return array, _spacing(header, len(header.get_data_shape())), header


def nifti_bytes(path: Path) -> int:
    """What the voxels take in memory, by the header alone."""
    with closing(_open(path)) as file:
        header = _read_header(file)
        slope, inter = header.get_slope_inter()
        scaled = slope is not None and (slope, inter) != (1.0, 0.0)
        itemsize = int(header.get_data_dtype().itemsize)
        return math.prod(_shape(path, header)) * max(itemsize, 8 if scaled else 0)


def unit_in_mm(header: Any) -> float:
    return _UNITS_IN_MM.get(header.get_xyzt_units()[0], 1.0)


def nifti_image(array: Array, spacing: tuple[float, float, float], header: Any, description: str) -> Any:
    """An image of (Z, H, W) with `header` as it was read or, where there is none, with the spacing alone."""
    data = array.transpose(2, 1, 0)
    if header is None:
        image = nib.Nifti1Image(data, np.diag([*spacing[::-1], 1.0]), dtype=data.dtype)
        image.header.set_xyzt_units("mm")
    else:
        header = header.copy()
        header.set_data_dtype(array.dtype)
        header.set_slope_inter(1, 0)
        header["cal_min"] = header["cal_max"] = 0
        stored = tuple(int(n) for n in header["dim"][1 : 1 + int(header["dim"][0])])
        # affine None: sform, qform, their codes and pixdim stay exactly as they were read, right or wrong.
        kind = nib.Nifti2Image if isinstance(header, nib.Nifti2Header) else nib.Nifti1Image
        image = kind(data.reshape(stored), None, header)
    if description:
        image.header["descrip"] = description.encode("ascii", "replace")[:79]
    return image


def _is_packed(path: Path) -> bool:
    return path.name.lower().endswith(".gz")


def _open(path: Path, content: bytes | None = None) -> IO[bytes]:
    if _is_packed(path):
        return gzip.open(path if content is None else BytesIO(content), "rb")  # type: ignore[return-value]
    return path.open("rb") if content is None else BytesIO(content)


def _read_header(file: IO[bytes]) -> Any:
    """The header with its extensions; the file stands at the voxels then."""
    head = file.read(4)
    second = head in (struct.pack("<i", 540), struct.pack(">i", 540))
    kind = nib.Nifti2Header if second else nib.Nifti1Header
    head += file.read(kind.template_dtype.itemsize - len(head))
    header = kind.from_fileobj(BytesIO(head + bytes(4)))
    more = int(header.get_data_offset()) - len(head)
    if not 0 <= more <= _EXTENSIONS:
        raise ValueError(f"the voxels are said to begin at byte {header.get_data_offset()}")
    head += file.read(more)
    return kind.from_fileobj(BytesIO(head)) if more > 4 else header


def _shape(path: Path, header: Any) -> tuple[int, int, int]:
    """(X, Y, Z); refuses what is no volume."""
    shape = tuple(int(n) for n in header.get_data_shape())
    if len(shape) > 3 and any(n != 1 for n in shape[3:]):
        raise PclmixError(
            f"{path} has {len(shape)} dimensions {shape}; a 3D volume is needed: export one frame or channel per file"
        )
    if any(n <= 0 for n in shape) or not shape:
        raise PclmixError(f"{path} is empty: its shape is {shape}")
    x, y, z = (*shape, 1, 1)[:3]
    return x, y, z


def _fill(file: IO[bytes], raw: npt.NDArray[np.uint8]) -> None:
    view = memoryview(raw.data)
    at = 0
    while at < len(view):
        chunk = file.read(min(_CHUNK, len(view) - at))
        if not chunk:
            raise EOFError(f"{len(view)} bytes of voxels are announced, {at} are there")
        view[at : at + len(chunk)] = chunk
        at += len(chunk)


def _read_to_end(path: Path, file: IO[bytes]) -> None:
    count = 0
    while chunk := file.read(_CHUNK):
        count += len(chunk)
        if count > _EXTENSIONS:
            raise PclmixError(f"{path} holds more than its header says; write it again")


def _spacing(header: Any, dimensions: int) -> tuple[float, float, float]:
    """(Z, H, W) in mm, from pixdim."""
    zooms = [float(z) * unit_in_mm(header) for z in header["pixdim"][1:4]]
    x, y, z = (abs(v) if np.isfinite(v) and v != 0 else 1.0 for v in zooms)
    return (1.0 if dimensions == 2 else z), y, x
