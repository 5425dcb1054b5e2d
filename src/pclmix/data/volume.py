"""Images and label maps on disk, with their geometry.

Arrays are (Z, H, W): for NIfTI, stored (X, Y, Z), that is the transpose, and slices lie along the last stored axis.
Millimetres come from pixdim, never from the affine: some files (ACDC's own) carry 1 mm in the sform. What is
written repeats the header of what was read.
"""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

from pclmix.errors import PclmixError
from pclmix.files import atomic_path

Array = npt.NDArray[Any]

#: File endings that can be read and written, longest first.
ENDINGS = (".nii.gz", ".nii", ".tiff", ".tif", ".png", ".bmp")
_UNITS_IN_MM = {"meter": 1000.0, "mm": 1.0, "micron": 0.001, "unknown": 1.0}


@dataclass(frozen=True)
class Geometry:
    """Where the voxels are: enough to write another array over the same grid."""

    shape: tuple[int, int, int]  #: Z, H, W
    spacing: tuple[float, float, float]  #: millimetres along Z, H, W
    header: Any = field(default=None, compare=False, repr=False)  #: the NIfTI header as read, or None

    @property
    def sform_spacing(self) -> tuple[float, float, float] | None:
        """The spacing that the sform implies (Z, H, W), or None where there is no sform."""
        if self.header is None or int(self.header["sform_code"]) == 0:
            return None
        x, y, z = np.sqrt((self.header.get_sform()[:3, :3] ** 2).sum(axis=0)) * _unit(self.header)
        return float(z), float(y), float(x)

    @property
    def affine(self) -> Array:
        """Voxel (X, Y, Z) to world, as the header has it; the identity scaled by spacing where there is none."""
        if self.header is not None:
            return np.asarray(self.header.get_best_affine())
        return np.diag([*self.spacing[::-1], 1.0])

    def same_grid(self, other: Geometry) -> str:
        """Empty when both describe one grid, else what differs."""
        if self.shape != other.shape:
            return f"shapes differ: {self.shape} and {other.shape} (Z, H, W)"
        if not np.allclose(self.spacing, other.spacing, rtol=1e-3, atol=1e-4):
            return f"spacings differ: {_mm(self.spacing)} and {_mm(other.spacing)} (Z, H, W)"
        if self.header is not None and other.header is not None:
            scale = max(1.0, float(np.abs(self.affine).max()))
            if not np.allclose(self.affine, other.affine, atol=1e-3 * scale):
                return "orientation or origin differ (the affines are not equal)"
        return ""


@dataclass(frozen=True)
class Volume:
    """Channels of one image, `array` being (C, Z, H, W)."""

    array: Array
    geometry: Geometry


def _mm(spacing: tuple[float, ...]) -> str:
    return " x ".join(f"{s:.4g}" for s in spacing) + " mm"


def _unit(header: Any) -> float:
    return _UNITS_IN_MM.get(header.get_xyzt_units()[0], 1.0)


def ending_of(path: Path) -> str:
    """The known ending of a file name, or the empty string."""
    name = Path(path).name.lower()
    return next((e for e in ENDINGS if name.endswith(e)), "")


def stem_of(path: Path) -> str:
    """The file name without its known ending."""
    name, ending = Path(path).name, ending_of(path)
    return name[: -len(ending)] if ending else Path(path).stem


def read_image(path: Path) -> Volume:
    """Read an image of one or more channels; refuses what no network can use (NaN, 4D, empty)."""
    array, geometry = _read(Path(path))
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        count = int((~np.isfinite(array)).sum())
        raise PclmixError(f"{path}: {count} voxels are NaN or infinite; repair the image before using it")
    if array.dtype.kind not in "iufb":
        raise PclmixError(f"{path}: values of type {array.dtype} are not intensities")
    return Volume(array, geometry)


def read_labels(path: Path) -> tuple[npt.NDArray[np.int64], Geometry]:
    """Read a label map (Z, H, W). Whole numbers stored as float are accepted, anything else is refused."""
    array, geometry = _read(Path(path))
    if array.shape[0] != 1:
        raise PclmixError(f"{path}: a label map must have one channel, this one has {array.shape[0]}")
    array = array[0]
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or not (array == np.round(array)).all():
            raise PclmixError(
                f"{path}: label values must be whole numbers; this file holds fractions "
                "(is it an image or a probability map?)"
            )
    elif array.dtype.kind not in "iub":
        raise PclmixError(f"{path}: values of type {array.dtype} are not labels")
    return array.astype(np.int64), geometry


def write_labels(path: Path, array: Array, like: Geometry, names: tuple[str, ...] = ()) -> None:
    """Write a label map (Z, H, W) over the grid of `like`; class names go into the header's description."""
    dtype = np.uint8 if int(array.max(initial=0)) < 256 else np.uint16
    _write(
        Path(path),
        np.ascontiguousarray(array.astype(dtype)),
        like,
        " ".join(f"{k}={n}" for k, n in enumerate(names)),
    )


def write_map(path: Path, array: Array, like: Geometry, description: str = "") -> None:
    """Write a map of real numbers (Z, H, W), such as an uncertainty, as float32 over the grid of `like`."""
    _write(Path(path), np.ascontiguousarray(array.astype(np.float32)), like, description)


def write_image(path: Path, array: Array, like: Geometry, description: str = "") -> None:
    """Write one channel (Z, H, W) over the grid of `like`, values and type unchanged."""
    _write(Path(path), np.ascontiguousarray(array), like, description)


def require_ending(path: Path) -> str:
    """The ending of a file that can be read and written here."""
    ending = ending_of(path)
    if not ending:
        raise PclmixError(f"{path}: unknown file ending; known are {', '.join(ENDINGS)}")
    return ending


def _read(path: Path) -> tuple[Array, Geometry]:
    """(C, Z, H, W) and geometry, with one message for every way a file can be bad."""
    if not path.exists():
        raise PclmixError(f"{path} does not exist")
    if path.is_dir():
        raise PclmixError(f"{path} is a folder, an image file is needed")
    ending = require_ending(path)
    try:
        array, geometry = _read_nifti(path) if ending.startswith(".nii") else _read_plain(path, ending)
    except PclmixError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise PclmixError(f"{path} is truncated or damaged ({error}); copy it again from its source") from error
    except PermissionError as error:
        raise PclmixError(f"{path} cannot be read: {error.strerror}; ask for the right to read it") from error
    except Exception as error:  # a damaged file can make the libraries below raise anything at all
        raise PclmixError(f"{path} cannot be read as {ending}: {error}; copy it again from its source") from error
    if array.size == 0:
        raise PclmixError(f"{path} is empty: its shape is {array.shape[1:]} (Z, H, W)")
    return array, geometry


def _read_nifti(path: Path) -> tuple[Array, Geometry]:
    image = _load_nifti(path)
    shape = tuple(int(n) for n in image.shape)
    if len(shape) > 3 and any(n != 1 for n in shape[3:]):
        raise PclmixError(
            f"{path} has {len(shape)} dimensions {shape}; a 3D volume is needed: export one frame or channel per file"
        )
    if 0 in shape:
        raise PclmixError(f"{path} is empty: its shape is {shape}")
    data = np.asarray(image.dataobj)
    data = data.reshape((*shape, 1, 1)[:3])
    header = image.header.copy()
    header.get_best_affine()  # raises where the header describes no space at all
    zooms = [float(z) * _unit(header) for z in header["pixdim"][1:4]]
    x, y, z = (abs(v) if np.isfinite(v) and v != 0 else 1.0 for v in zooms)
    if len(shape) == 2:
        z = 1.0
    array = np.ascontiguousarray(data.transpose(2, 1, 0))[None]
    return array, Geometry((array.shape[1], array.shape[2], array.shape[3]), (z, y, x), header)


def _load_nifti(path: Path) -> Any:
    """NIfTI 1 or 2. A .gz is read to its end, so that its checksum is verified: nibabel stops before that."""
    content = path.read_bytes()
    if path.name.lower().endswith(".gz"):
        content = gzip.decompress(content)
    if not content:
        raise PclmixError(f"{path} is an empty file; copy it again from its source")
    second = struct.pack("<i", 540), struct.pack(">i", 540)
    return (nib.Nifti2Image if content[:4] in second else nib.Nifti1Image).from_bytes(content)


def _read_plain(path: Path, ending: str) -> tuple[Array, Geometry]:
    """PNG, BMP: one slice of 1 or 3 channels. TIFF: one slice or a stack, spacing from NAME.json as nnU-Net does."""
    if ending in (".tif", ".tiff"):
        import tifffile

        data = np.asarray(tifffile.imread(path))
    else:
        from PIL import Image

        with Image.open(path) as image:
            # Transparency is dropped; a palette holds label numbers (so label tools write them): its indices are kept.
            plain = {"RGBA": "RGB", "CMYK": "RGB", "LA": "L"}
            data = np.asarray(image.convert(plain[image.mode]) if image.mode in plain else image)
    if data.ndim == 2:
        array = data[None, None]
    elif data.ndim == 3 and data.shape[-1] in (3, 4) and data.shape[0] > 4:
        array = np.moveaxis(data[..., :3], -1, 0)[:, None]
    elif data.ndim == 3:
        array = data[None]
    else:
        raise PclmixError(f"{path} has {data.ndim} dimensions {data.shape}; a slice, an RGB slice or a stack is needed")
    spacing = _sidecar_spacing(path)
    return np.ascontiguousarray(array), Geometry((array.shape[1], array.shape[2], array.shape[3]), spacing)


def _sidecar_spacing(path: Path) -> tuple[float, float, float]:
    stem = stem_of(path)
    for name in (stem, stem.rpartition("_")[0]):
        sidecar = path.with_name(f"{name}.json")
        if name and sidecar.is_file():
            content = json.loads(sidecar.read_text(encoding="utf-8"))
            if isinstance(content, dict) and "spacing" in content:
                values = [float(v) for v in content["spacing"]]
                z, y, x = ([1.0] * (3 - len(values)) + values)[-3:]
                return z, y, x
    return 1.0, 1.0, 1.0


def _write(path: Path, array: Array, like: Geometry, description: str) -> None:
    if array.shape != like.shape:
        raise ValueError(f"{path}: array {array.shape} does not fit the grid {like.shape}")
    ending = require_ending(path)
    if ending in (".png", ".bmp"):
        if array.shape[0] != 1:
            raise PclmixError(
                f"{path}: a {ending} file holds one slice, this volume has {array.shape[0]}; use .nii.gz or .tif"
            )
        if array.dtype == np.float32:
            raise PclmixError(f"{path}: a {ending} file cannot hold real numbers; use .nii.gz or .tif")
    with atomic_path(path) as temporary:
        if ending.startswith(".nii"):
            nib.save(_nifti(array, like, description), temporary)
        elif ending in (".tif", ".tiff"):
            import tifffile

            stack = array[0] if array.shape[0] == 1 else array
            # Said outright: three slices would else be taken for the colours of one picture.
            tifffile.imwrite(temporary, stack, photometric="minisblack", compression="zlib")
        else:
            from PIL import Image

            Image.fromarray(array[0]).save(temporary)


def _nifti(array: Array, like: Geometry, description: str) -> Any:
    data = array.transpose(2, 1, 0)
    if like.header is None:
        image = nib.Nifti1Image(data, np.diag([*like.spacing[::-1], 1.0]), dtype=data.dtype)
        image.header.set_xyzt_units("mm")
    else:
        header = like.header.copy()
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
