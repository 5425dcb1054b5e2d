"""Images and label maps on disk, with their geometry.

Arrays are (Z, H, W): for NIfTI, stored (X, Y, Z), that is the transpose, and slices lie along the last stored axis.
Millimetres come from pixdim, never from the affine: some files (ACDC's own) carry 1 mm in the sform. A file is written
with the header of the file that was read.
"""

from __future__ import annotations

import gzip
import io
import unicodedata
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import nibabel as nib
import numpy as np
import numpy.typing as npt

from pclmix.errors import PclmixError
from pclmix.io.files import atomic_path, read_json
from pclmix.io.formats import (
    nifti_bytes,
    nifti_image,
    picture_bytes,
    read_nifti,
    read_picture,
    require_picture,
    unit_in_mm,
    write_picture,
)
from pclmix.labels import Labels

Array = npt.NDArray[Any]
Unit = Literal["mm", "px"]

LARGEST = 1e30  #: of an intensity: differences of larger values are infinite in float32
#: File endings that can be read and written, longest first.
ENDINGS = (".nii.gz", ".nii", ".tiff", ".tif", ".png", ".bmp")
#: Endings of images that are read only: their compression would change label values.
PHOTOS = (".jpeg", ".jpg")


@dataclass(frozen=True)
class Geometry:
    """The voxel grid: enough to write another array on it."""

    shape: tuple[int, int, int]  #: Z, H, W
    spacing: tuple[float, float, float]  #: size of a voxel along Z, H, W, in `unit`
    header: Any = field(default=None, compare=False, repr=False)  #: the NIfTI header as read, or None
    unit: Unit = field(default="mm", compare=False)  #: "px" if the file has no spacing, as most pictures

    @property
    def sform_spacing(self) -> tuple[float, float, float] | None:
        """The spacing that the sform implies (Z, H, W), or None where there is no sform."""
        if self.header is None or int(self.header["sform_code"]) == 0:
            return None
        x, y, z = np.sqrt((self.header.get_sform()[:3, :3] ** 2).sum(axis=0)) * unit_in_mm(self.header)
        return float(z), float(y), float(x)

    @property
    def affine(self) -> Array:
        """Voxel (X, Y, Z) to world, from the header; without one, the identity scaled by spacing."""
        if self.header is not None:
            return np.asarray(self.header.get_best_affine())
        return np.diag([*self.spacing[::-1], 1.0])

    def same_grid(self, other: Geometry) -> str:
        """Empty if both grids are equal, else the difference."""
        if self.shape != other.shape:
            return f"shapes differ: {self.shape} and {other.shape} (Z, H, W)"
        if self.unit == other.unit and not np.allclose(self.spacing, other.spacing, rtol=1e-3, atol=1e-4):
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

    @property
    def is_colour(self) -> bool:
        """Whether the channels are red, green and blue: three of them in a picture file."""
        return len(self.array) == 3 and self.geometry.header is None


def _mm(spacing: tuple[float, ...]) -> str:
    return " x ".join(f"{s:.4g}" for s in spacing) + " mm"


def ending_of(path: Path) -> str:
    """The known ending of a file name, or the empty string."""
    name = Path(path).name.lower()
    return next((e for e in ENDINGS if name.endswith(e)), "")


def image_ending_of(path: Path) -> str:
    """`ending_of`, or that of a photo."""
    name = Path(path).name.lower()
    return ending_of(path) or next((e for e in PHOTOS if name.endswith(e)), "")


def stem_of(path: Path) -> str:
    """The file name without its known ending."""
    name, ending = Path(path).name, ending_of(path)
    return name[: -len(ending)] if ending else Path(path).stem


def read_image(path: Path, content: bytes | None = None) -> Volume:
    """Read an image of one or more channels; refuses NaN, 4D and empty images.

    `content` is the content of the file, if already read; the file is then not opened again.
    """
    path = Path(path)
    array, geometry = _read(path, image_ending_of(path) or require_ending(path), content)
    if array.dtype.kind not in "iufb":
        raise PclmixError(f"{path}: values of type {array.dtype} are not intensities")
    if array.dtype.kind == "f":
        count = sum(int((~(np.abs(plane) <= LARGEST)).sum()) for channel in array for plane in channel)
        if count:
            raise PclmixError(
                f"{path}: {count} voxels are NaN or infinite, or beyond {LARGEST:g}; repair the image before using it"
            )
    return Volume(array, geometry)


def read_labels(path: Path, content: bytes | None = None) -> tuple[npt.NDArray[np.integer[Any]], Geometry]:
    """Read a label map (Z, H, W) with the integers of its file, or of `content`, if already read.

    Accepts whole numbers stored as float, and pictures of three equal planes.
    """
    path = Path(path)
    if image_ending_of(path) in PHOTOS:
        raise PclmixError(f"{path}: JPEG changes label values; save label maps as PNG")
    array, geometry = _read(path, require_ending(path), content, indices=True)
    if array.shape[0] == 3 and (array == array[:1]).all():
        array = array[:1]
    if array.shape[0] != 1:
        raise PclmixError(
            f"{path}: a label map must have one channel, this one has {array.shape[0]} that differ: is it a picture of "
            "the labels' colours? Save the label numbers"
        )
    array = array[0]
    if array.dtype.kind == "f":
        if not all(bool((np.abs(plane) < 2**31).all() and (plane == np.round(plane)).all()) for plane in array):
            raise PclmixError(
                f"{path}: label values must be whole numbers; this file holds fractions "
                "(is it an image or a probability map?)"
            )
        array = array.astype(np.int32)
    elif array.dtype.kind == "b":
        array = array.astype(np.uint8)
    elif array.dtype.kind not in "iu":
        raise PclmixError(f"{path}: values of type {array.dtype} are not labels")
    return array, geometry


def write_labels(
    path: Path, array: Array, like: Geometry, names: tuple[str, ...] = (), colours: Sequence[str] = ()
) -> None:
    """Write a label map (Z, H, W) over the grid of `like`; class names go into the header's description.

    `colours`, #rrggbb per class, become the palette of a PNG or BMP file, whose pixels stay class numbers. Without
    them such a file is grey: readable by nnU-Net, but it looks black.
    """
    dtype = np.uint8 if int(array.max(initial=0)) < 256 else np.uint16
    description = " ".join(f"{k}={n}" for k, n in enumerate(names))
    _write(Path(path), np.ascontiguousarray(array.astype(dtype)), like, description, colours)


def write_map(path: Path, array: Array, like: Geometry, description: str = "") -> None:
    """Write a map of real numbers (Z, H, W), such as an uncertainty, as float32 over the grid of `like`."""
    _write(Path(path), np.ascontiguousarray(array.astype(np.float32)), like, description)


def write_image(path: Path, array: Array, like: Geometry, description: str = "") -> None:
    """Write one channel (Z, H, W) over the grid of `like`, values and type unchanged."""
    _write(Path(path), np.ascontiguousarray(array), like, description)


def require_ending(path: Path) -> str:
    """The ending of a path, if its format is supported."""
    ending = ending_of(path)
    if not ending:
        raise PclmixError(f"{path}: unknown file ending; known are {', '.join(ENDINGS)}")
    return ending


def decoded_bytes(path: Path) -> int:
    """Memory of an image, from its header, to be compared with a limit before reading."""
    path = Path(path)
    ending = image_ending_of(path) or require_ending(path)
    return int(_guarded(path, ending, lambda: nifti_bytes(path) if _is_nifti(ending) else picture_bytes(path, ending)))


def _is_nifti(ending: str) -> bool:
    return ending.startswith(".nii")


def _read(path: Path, ending: str, content: bytes | None, *, indices: bool = False) -> tuple[Array, Geometry]:
    """(C, Z, H, W) and geometry; `indices` as in `read_picture`."""
    array, geometry = _guarded(path, ending, lambda: _read_any(path, ending, content, indices))
    if array.size == 0:
        raise PclmixError(f"{path} is empty: its shape is {array.shape[1:]} (Z, H, W)")
    return array, geometry


def _read_any(path: Path, ending: str, content: bytes | None, indices: bool) -> tuple[Array, Geometry]:
    if _is_nifti(ending):
        array, spacing, header = read_nifti(path, content)
        return array, Geometry((array.shape[1], array.shape[2], array.shape[3]), spacing, header)
    array, found = read_picture(path, ending, content, indices=indices), _sidecar_spacing(path)
    shape = (array.shape[1], array.shape[2], array.shape[3])
    return array, Geometry(shape, found or (1.0, 1.0, 1.0), unit="mm" if found else "px")


def _guarded(path: Path, ending: str, read: Callable[[], Any]) -> Any:
    """`read()` with one error message for any damaged file."""
    try:
        if not path.exists():
            raise PclmixError(f"{path} does not exist")
        if path.is_dir():
            raise PclmixError(f"{path} is a folder, an image file is needed")
        return read()
    except PclmixError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise PclmixError(f"{path} is truncated or damaged ({error}); copy it again from its source") from error
    except PermissionError as error:
        raise PclmixError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    except MemoryError as error:
        raise PclmixError(f"{path} does not fit in memory; cut it into parts") from error
    except Exception as error:  # the libraries raise many types of errors for damaged files
        reason = " ".join(str(error).split())[:300]
        raise PclmixError(f"{path} cannot be read as {ending}: {reason}; copy it again from its source") from error


def _sidecar_spacing(path: Path) -> tuple[float, float, float] | None:
    stem = stem_of(path)
    for name in (stem, stem.rpartition("_")[0]):
        sidecar = path.with_name(f"{name}.json")
        if name and sidecar.is_file():
            content = read_json(sidecar)
            if isinstance(content, dict) and "spacing" in content:
                values = content["spacing"]
                if not isinstance(values, list) or not 1 <= len(values) <= 3 or not all(map(_is_length, values)):
                    raise PclmixError(f"{sidecar}: spacing={values!r}: one to three lengths in mm are needed")
                z, y, x = [1.0] * (3 - len(values)) + [float(v) for v in values]
                return z, y, x
    return None


def _is_length(value: Any) -> bool:
    return type(value) in (int, float) and 1e-6 <= value <= 1e6


def _write(path: Path, array: Array, like: Geometry, description: str, colours: Sequence[str] = ()) -> None:
    if array.shape != like.shape:
        raise ValueError(f"{path}: array {array.shape} does not fit the grid {like.shape}")
    ending = require_ending(path)
    if not _is_nifti(ending):
        require_picture(path, ending, array)
    with atomic_path(path) as temporary:
        if _is_nifti(ending):
            nib.save(nifti_image(array, like.spacing, like.header, description), temporary)
        else:
            write_picture(temporary, ending, array, colours)


NRRD_ENDING = ".seg.nrrd"


def write_nrrd(path: Path, array: npt.NDArray[Any], like: Geometry, labels: Labels) -> None:
    """Write labels (Z, H, W) for 3D Slicer: a .seg.nrrd of one layer, one segment per foreground class.

    World coordinates are those of the image's own header (its best affine, as viewers take it), turned from NIfTI's
    right-anterior-superior to left-posterior-superior. NRRD headers are ASCII: accents are dropped from class names,
    other characters are written as escapes.
    """
    import nrrd

    data = np.ascontiguousarray(array.astype(np.uint8 if labels.count <= 256 else np.uint16))
    affine = np.diag([-1.0, -1.0, 1.0, 1.0]) @ like.affine
    header: dict[str, Any] = {
        "space": "left-posterior-superior",
        "space directions": affine[:3, :3].T,
        "kinds": ["domain"] * 3,
        "encoding": "gzip",
        "space origin": affine[:3, 3],
    }
    for number, (name, colour) in enumerate(zip(labels.foreground, labels.colours()[1:], strict=True)):
        header |= _segment(number, name, colour, data)
    header |= {
        "Segmentation_ContainedRepresentationNames": "Binary labelmap|",
        "Segmentation_MasterRepresentation": "Binary labelmap",
        "Segmentation_ReferenceImageExtentOffset": "0 0 0",
    }
    buffer = io.BytesIO()
    nrrd.write(buffer, data, header, index_order="C", compression_level=6)
    head, _, voxels = buffer.getvalue().partition(b"\n\n")
    # pynrrd writes the time as a comment; without it the file depends on the labels only.
    lines = [line for line in head.split(b"\n") if not line.startswith(b"#")]
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"\n".join(lines) + b"\n\n" + voxels)


def _segment(number: int, name: str, colour: str, data: npt.NDArray[Any]) -> dict[str, str]:
    """Header fields of one segment for 3D Slicer. The extent is in voxels along X, Y, Z."""
    places = np.argwhere(data == number + 1)
    low, high = (places.min(0), places.max(0)) if len(places) else (np.zeros(3, int), np.full(3, -1))
    plain = unicodedata.normalize("NFKD", " ".join(name.split()))
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    values = {
        "Color": " ".join(f"{int(colour[i : i + 2], 16) / 255:.6g}" for i in (1, 3, 5)),
        "ColorAutoGenerated": "0",
        "Extent": " ".join(f"{low[axis]} {high[axis]}" for axis in (2, 1, 0)),
        "ID": f"Segment_{number + 1}",
        "LabelValue": str(number + 1),
        "Layer": "0",
        "Name": plain.encode("ascii", "backslashreplace").decode("ascii"),
        "NameAutoGenerated": "0",
        "Tags": "Segmentation.Status:completed|",
    }
    return {f"Segment{number}_{key}": value for key, value in values.items()}
