"""PNG, BMP and TIFF on disk. Only the formats named here are opened, and never another file than the one asked for."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pclmix.errors import PclmixError, need_extra
from pclmix.io.limits import require_size

Array = npt.NDArray[Any]

TIFF = (".tif", ".tiff")
#: Pillow knows more than forty formats; some of them (EPS) start other programs.
_FORMATS = ("PNG", "BMP", "JPEG")
#: Formats of tifffile whose pages may lie in other files.
_ALONE = dict.fromkeys(("is_ome", "is_mmstack", "is_ndtiff"), False)
_DEFLATE = (8, 32946)
#: How many times its packed size a part can unpack to, by TIFF's number of the compression: none, PackBits, deflate.
_PACKED = {1: 1, 32773: 64, 8: 1032, 32946: 1032}
_PACKED_MOST = 10_000
_LZMA = 34925


def read_picture(path: Path, ending: str, content: bytes | None = None) -> Array:
    """One slice of one or three channels, or for TIFF a stack: (C, Z, H, W).

    `content` is the file's, where it has been read.
    """
    data = _read_tiff(path, content) if ending in TIFF else _read_plain(path, content)
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
    """What a picture takes in memory, by its header alone."""
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
        # Said outright: three slices would else be taken for the colours of one picture.
        tifffile.imwrite(path, stack, photometric="minisblack", compression="zlib")
    else:
        from PIL import Image

        picture = Image.fromarray(array[0])
        if colours and array.dtype == np.uint8:
            picture.putpalette(bytes.fromhex("".join(colours).replace("#", "")))
        picture.save(path)


def require_picture(path: Path, ending: str, array: Array) -> None:
    """Refuse what a picture of this kind cannot hold."""
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

    # The limit below is stricter, and does not print a warning beside the message.
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    try:
        return Image.open(path if content is None else BytesIO(content), formats=_FORMATS)
    except Image.DecompressionBombError as error:
        raise PclmixError(f"{path} is too large a picture ({error}); cut it into parts, or save it as TIFF") from error


def _plain_bytes(image: Any) -> int:
    depth = 2 if image.mode.startswith("I;16") else 4 if image.mode in ("I", "F") else 1
    return int(image.width * image.height * len(image.getbands()) * depth)


def _read_plain(path: Path, content: bytes | None) -> Array:
    with _open_plain(path, content) as image:
        require_size(path, _plain_bytes(image))
        # Transparency is dropped; a palette holds label numbers (so label tools write them): its indices are kept.
        plain = {"RGBA": "RGB", "CMYK": "RGB", "LA": "L"}
        return np.asarray(image.convert(plain[image.mode]) if image.mode in plain else image)


def _open_tiff(path: Path, content: bytes | None = None) -> Any:
    """The file's own pages: what it says of other files (OME, Micro-Manager) is not followed."""
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
        if series.dataoffset is not None:  # one block without gaps, of which ImageJ describes the first page alone
            most = file.filehandle.size - series.dataoffset
        else:
            most = sum(
                sum(page.databytecounts) * _PACKED.get(int(page.keyframe.compression), _PACKED_MOST) for page in pages
            )
        if most < declared:  # decoding would fill gigabytes with nothing
            raise PclmixError(f"{path} announces {declared} bytes of pixels, which it cannot hold; write it again")
        for page in pages:
            _require_honest(path, page, file.filehandle)
        return np.asarray(series.asarray(maxworkers=1))


def _require_honest(path: Path, page: Any, file: Any) -> None:
    """Refuse a page whose packed parts hold more than they say: they are inflated in one go."""
    if page.keyframe.compression == _LZMA:
        raise PclmixError(f"{path} is packed with LZMA; save it with deflate or LZW")
    if page.keyframe.compression not in _DEFLATE:
        return
    shape, itemsize = page.keyframe.chunks, page.keyframe.dtype.itemsize
    largest = math.prod(shape) * itemsize
    for offset, count in zip(page.dataoffsets, page.databytecounts, strict=True):
        if count * 1032 <= largest:  # deflate cannot pack tighter
            continue
        file.seek(offset)
        inflater = zlib.decompressobj()
        left, data = largest, file.read(count)
        while data and not inflater.eof:
            left -= len(inflater.decompress(data, 1 << 20))
            if left < 0:
                raise PclmixError(f"{path}: a part of it unpacks to more than its {largest} bytes; write it again")
            data = inflater.unconsumed_tail
