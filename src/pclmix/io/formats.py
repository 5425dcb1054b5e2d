"""File formats in bytes and arrays: NIfTI 1 and 2, PNG, BMP and TIFF.

Only these formats are opened, and never another file than the one asked for.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import warnings
import zlib
from collections.abc import Sequence
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

from pclmix.errors import PclmixError, need_extra
from pclmix.io.files import require_size

Array = npt.NDArray[Any]

_UNITS_IN_MM = {"meter": 1000.0, "mm": 1.0, "micron": 0.001, "unknown": 1.0}
_CHUNK = 4 << 20
_PLAIN = {"RGBA": "RGB", "CMYK": "RGB", "LA": "L"}  # modes of pictures; transparency is dropped
_EXTENSIONS = 16 << 20  # bytes of header extensions, and of what may follow the voxels


def read_nifti(path: Path, content: bytes | None = None) -> tuple[Array, tuple[float, float, float], Any]:
    """Voxels (1, Z, H, W), spacing (Z, H, W) in mm and the header. Needs little more memory than the voxels.

    A .gz is read to its end, so that its checksum is verified. `content` is the content of the file, if already read.
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
        array = array * np.float64(slope)
        array += np.float64(inter)
    if not np.isfinite(header.get_best_affine()).all():  # raises if the header has no valid affine
        raise PclmixError(f"{path}: the position of its voxels (sform or qform) is not finite; correct its header")
    return array, _spacing(path, header), header


def nifti_bytes(path: Path) -> int:
    """Memory of the voxels, from the header."""
    with closing(_open(path)) as file:
        header = _read_header(file)
        slope, inter = header.get_slope_inter()
        scaled = slope is not None and (slope, inter) != (1.0, 0.0)
        itemsize = int(header.get_data_dtype().itemsize)
        return math.prod(_shape(path, header)) * max(itemsize, 8 if scaled else 0)


def unit_in_mm(header: Any) -> float:
    return _UNITS_IN_MM.get(header.get_xyzt_units()[0], 1.0)


def nifti_image(array: Array, spacing: tuple[float, float, float], header: Any, description: str) -> Any:
    """An image of (Z, H, W) with `header` as read or, without one, with the spacing only."""
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
        # affine None: sform, qform, their codes and pixdim stay exactly as they were read.
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
    """The header with its extensions; the file position is then at the voxels."""
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
    """(X, Y, Z); refuses anything but a volume."""
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


def _spacing(path: Path, header: Any) -> tuple[float, float, float]:
    """(Z, H, W) in mm, from pixdim; 1 where it has none."""
    zooms = [float(z) * unit_in_mm(header) for z in header["pixdim"][1:4]]
    x, y, z = (abs(v) if np.isfinite(v) and v != 0 else 1.0 for v in zooms)
    spacing = (1.0 if len(header.get_data_shape()) == 2 else z), y, x
    if not all(1 / _FARTHEST < v < _FARTHEST for v in spacing):
        raise PclmixError(f"{path}: the voxels measure {x:g} x {y:g} x {z:g} mm; correct pixdim in its header")
    return spacing


_FARTHEST = 1e9  #: mm; larger voxels, and those smaller than its inverse, are mistakes
TIFF = (".tif", ".tiff")
#: Of Pillow's forty formats some (EPS) start other programs.
_FORMATS = ("PNG", "BMP", "JPEG")
_PNG = b"\x89PNG\r\n\x1a\n"
_ORIENTATION = 0x0112  # EXIF tag; label tools differ in whether they follow it
#: Formats of tifffile whose pages may lie in other files.
_ALONE = dict.fromkeys(("is_ome", "is_mmstack", "is_ndtiff"), False)
_DEFLATE = (8, 32946)
#: Largest compression ratio by TIFF's compression number: none, PackBits, deflate.
_PACKED = {1: 1, 32773: 64, 8: 1032, 32946: 1032}
_PACKED_MOST = 10_000
_LZMA = 34925


def read_picture(path: Path, ending: str, content: bytes | None = None, *, indices: bool = False) -> Array:
    """One slice of one or three channels, or for TIFF a stack: (C, Z, H, W).

    `content` is the content of the file, if already read. `indices` keeps the numbers of a palette, which in a label
    map are the classes; without it they become the palette's colours.
    """
    data = _read_tiff(path, content) if ending in TIFF else _read_plain(path, content, indices)
    if data.ndim == 2:
        array = data[None, None]
    elif data.ndim == 3 and data.shape[-1] in (3, 4) and data.shape[0] > 4:
        array = np.moveaxis(data[..., :3], -1, 0)[:, None]
    elif data.ndim == 3:
        array = data[None]
    else:
        raise PclmixError(f"{path} has {data.ndim} dimensions {data.shape}; a slice, an RGB slice or a stack is needed")
    return np.ascontiguousarray(array)


def picture_bytes(path: Path, ending: str) -> int:
    """Memory of a picture, from its header."""
    if ending in TIFF:
        with _open_tiff(path) as file:
            return _tiff_bytes(path, file)
    with _open_plain(path) as image:
        return _plain_bytes(image)


def write_picture(path: Path, ending: str, array: Array, colours: Sequence[str] = ()) -> None:
    """Write (Z, H, W); PNG and BMP hold one slice, and labels in them get `colours` as a palette."""
    if ending in TIFF:
        tifffile = need_extra("tifffile", "tiff", f"{path}: writing TIFF")
        stack = array[0] if array.shape[0] == 1 else array
        # Explicit: three slices would otherwise be read as RGB.
        tifffile.imwrite(path, stack, photometric="minisblack", compression="zlib")
    else:
        from PIL import Image

        picture = Image.fromarray(array[0])
        if colours and array.dtype == np.uint8:
            picture.putpalette(bytes.fromhex("".join(colours).replace("#", "")))
        picture.save(path)


def require_picture(path: Path, ending: str, array: Array) -> None:
    """Refuse an array that this picture format cannot hold."""
    if ending in TIFF:
        need_extra("tifffile", "tiff", f"{path}: writing TIFF")
        return
    if array.shape[0] != 1:
        raise PclmixError(
            f"{path}: a {ending} file holds one slice, this volume has {array.shape[0]}; use .nii.gz or .tif"
        )
    if array.dtype == np.float32:
        raise PclmixError(f"{path}: a {ending} file cannot hold real numbers; use .nii.gz or .tif")


def _open_plain(path: Path, content: bytes | None = None) -> Any:
    from PIL import Image

    _require_chunks(path, content)
    # The limit below is stricter and prints no warning.
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    try:
        return Image.open(path if content is None else BytesIO(content), formats=_FORMATS)
    except Image.DecompressionBombError as error:
        raise PclmixError(f"{path} is too large a picture ({error}); cut it into parts, or save it as TIFF") from error


def _require_chunks(path: Path, content: bytes | None) -> None:
    """Refuse a PNG with a chunk longer than the file: Pillow would allocate that length."""
    with path.open("rb") if content is None else BytesIO(content) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if file.read(len(_PNG)) != _PNG:
            return
        kind = b""
        while kind != b"IEND" and len(head := file.read(8)) == 8:
            length, kind = int.from_bytes(head[:4], "big"), head[4:]
            if file.seek(length + 4, os.SEEK_CUR) > size:
                raise PclmixError(f"{path} is truncated or damaged: a chunk is longer than the file; copy it again")


def _plain_bytes(image: Any) -> int:
    depth = 2 if image.mode.startswith("I;16") else 4 if image.mode in ("I", "F") else 1
    return int(image.width * image.height * len(image.getbands()) * depth)


def _read_plain(path: Path, content: bytes | None, indices: bool) -> Array:
    with _open_plain(path, content) as image:
        coloured = image.mode == "P" and not indices
        require_size(path, _plain_bytes(image) * (3 if coloured else 1))
        if image.format == "JPEG" and image.getexif().get(_ORIENTATION, 1) != 1:
            raise PclmixError(f"{path} says in its EXIF data that it is to be turned; save it upright")
        if not coloured:
            return _plain_array(image, _PLAIN.get(image.mode, image.mode))
        rgb = _plain_array(image, "RGB")
        grey = all(np.array_equal(rgb[..., 0], rgb[..., k]) for k in (1, 2))
        return rgb[..., 0] if grey else rgb


def _plain_array(image: Any, mode: str) -> Array:
    """The pixels, a few rows at a time: converting the whole picture would take twice the memory."""
    rows = max(1, _CHUNK // (16 * max(1, image.width)))
    array = None
    for top in range(0, image.height, rows):
        part = image.crop((0, top, image.width, min(top + rows, image.height)))
        pixels = np.asarray(part if part.mode == mode else part.convert(mode))
        if array is None:
            array = np.empty((image.height, *pixels.shape[1:]), pixels.dtype)
        array[top : top + len(pixels)] = pixels
    if array is None:
        raise ValueError("it has no rows")
    return array


def _open_tiff(path: Path, content: bytes | None = None) -> Any:
    """The file's own pages; references to other files (OME, Micro-Manager) are not followed."""
    tifffile = need_extra("tifffile", "tiff", f"{path}: reading TIFF")
    return tifffile.TiffFile(path if content is None else BytesIO(content), _multifile=False, **_ALONE)


def _tiff_bytes(path: Path, file: Any) -> int:
    if not file.series:
        raise PclmixError(f"{path} holds no image")
    return int(math.prod(file.series[0].shape)) * int(file.series[0].dtype.itemsize)


def _read_tiff(path: Path, content: bytes | None) -> Array:
    with _open_tiff(path, content) as file:
        declared = _tiff_bytes(path, file)
        require_size(path, declared)
        series = file.series[0]
        pages = [page for page in series.pages if page is not None]
        if series.dataoffset is not None:  # one contiguous block; ImageJ describes only the first page
            most = file.filehandle.size - series.dataoffset
        else:
            if any(count > file.filehandle.size for page in pages for count in page.databytecounts):
                raise EOFError("a part of it is said to be longer than the file")
            most = sum(
                sum(page.databytecounts) * _PACKED.get(int(page.keyframe.compression), _PACKED_MOST) for page in pages
            )
        if most < declared:  # decoding would fill gigabytes with zeros
            raise PclmixError(f"{path} announces {declared} bytes of pixels, which it cannot hold; write it again")
        for page in pages:
            _require_honest(path, page, file.filehandle)
        try:
            return np.asarray(series.asarray(maxworkers=1))
        except ValueError as error:
            if "imagecodecs" not in str(error):
                raise
            raise PclmixError(
                f"{path}: its compression needs the package imagecodecs; pip install imagecodecs, or save it with "
                "deflate"
            ) from error


def _require_honest(path: Path, page: Any, file: Any) -> None:
    """Refuse a page whose compressed segments exceed their declared size: they are inflated in one go."""
    if page.keyframe.compression == _LZMA:
        raise PclmixError(f"{path} is compressed with LZMA; save it with deflate")
    if page.keyframe.compression not in _DEFLATE:
        return
    shape, itemsize = page.keyframe.chunks, page.keyframe.dtype.itemsize
    largest = math.prod(shape) * itemsize
    for offset, count in zip(page.dataoffsets, page.databytecounts, strict=True):
        if count * 1032 <= largest:  # the limit of deflate
            continue
        file.seek(offset)
        inflater = zlib.decompressobj()
        left, data = largest, file.read(count)
        while data and not inflater.eof:
            left -= len(inflater.decompress(data, 1 << 20))
            if left < 0:
                raise PclmixError(f"{path}: a part of it unpacks to more than its {largest} bytes; write it again")
            data = inflater.unconsumed_tail
