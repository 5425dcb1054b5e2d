"""DICOM: read a series, write a segmentation object. Needs the extra `dicom`."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

from pclmix import __version__
from pclmix.errors import PclmixError, need_extra
from pclmix.io.files import atomic_path, require_new_file, require_size
from pclmix.io.volume import Geometry, ending_of, write_image
from pclmix.labels import Labels

ENDING = ".seg.dcm"
_DEFLATED = "1.2.840.10008.1.2.1.99"  # the transfer syntax
#: Attributes that give the position of a slice, with their lengths.
_PLACE = {"ImageOrientationPatient": 6, "ImagePositionPatient": 3, "PixelSpacing": 2, "Rows": 1, "Columns": 1}


@dataclass(frozen=True)
class Series:
    """The slices of one series in order along their normal: array (1, Z, H, W), geometry, and the datasets."""

    array: npt.NDArray[Any]
    geometry: Geometry
    slices: tuple[Any, ...]


def is_series(folder: Path) -> bool:
    """Whether a folder holds DICOM files: by ending, or by the four letters at byte 128."""
    return folder.is_dir() and any(_is_dicom(path) for path in sorted(folder.iterdir()) if path.is_file())


def read_series(folder: Path) -> Series:
    """Read a folder with one series of parallel, evenly spaced slices, one file per slice.

    Intensities are rescaled as the files say. The affine is that of the files, turned to NIfTI's axes. Two series,
    several images of one position (the phases of a cine) and gaps are refused.
    """
    folder = Path(folder)
    try:
        return _read_series(folder)
    except PclmixError:
        raise
    except MemoryError as error:
        raise PclmixError(f"{folder} does not fit in memory; give it in parts") from error
    except Exception as error:  # pydicom decodes an element when it is first used, and raises many types of errors
        raise PclmixError(f"{folder} cannot be read as a DICOM series: {error}; export it again") from error


def read_file(path: Path, *, pixels: bool = True) -> Any:
    """The dataset of one DICOM file.

    A deflated file is refused: inflated as a whole, a small one could fill the memory before its header is known. The
    file is mapped, since reading a file object allocates the length that a damaged element claims.
    """
    import pydicom
    from pydicom.filereader import read_file_meta_info

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        named = content.find(_DEFLATED.encode()) >= 0
        if named and str(read_file_meta_info(path).get("TransferSyntaxUID", "")) == _DEFLATED:
            raise PclmixError("deflated DICOM is not supported; export it uncompressed")
        return pydicom.dcmread(content, stop_before_pixels=not pixels)  # type: ignore[arg-type]


def _read_series(folder: Path) -> Series:
    need_extra("pydicom", "dicom", f"{folder}: reading DICOM")
    found = []
    for path in sorted(p for p in folder.iterdir() if p.is_file() and _is_dicom(p)):
        try:
            found.append((path, read_file(path)))
        except PclmixError as error:
            raise PclmixError(f"{path}: {error}") from None
        except Exception as error:  # pydicom raises many types of errors for damaged files
            raise PclmixError(f"{path} cannot be read as DICOM: {error}; copy it again from its source") from error
    if not found:
        raise PclmixError(f"{folder} holds no DICOM file")
    _require_one(folder, [slice_ for _, slice_ in found])
    files = [(path, slice_) for path, slice_ in found if hasattr(slice_, "PixelData")]
    if not files:
        raise PclmixError(f"{folder}: none of its {len(found)} DICOM files holds an image")
    require_size(folder, sum(_bytes(slice_) for _, slice_ in files))
    across, down, positions = _frame(files)
    normal = np.cross(across, down)
    order = np.argsort(positions @ normal, kind="stable")
    slices = [files[i][1] for i in order]
    step = _step(folder, positions[order], normal, slices)
    first = slices[0]
    row_gap, column_gap = (float(v) for v in first.PixelSpacing)
    affine = np.eye(4)  # of (X, Y, Z): columns, rows, slices
    affine[:3, 0], affine[:3, 1], affine[:3, 2] = across * column_gap, down * row_gap, step
    affine[:3, 3] = positions[order[0]]
    spacing = (float(np.linalg.norm(step)), row_gap, column_gap)
    if not np.isfinite(affine).all() or not all(1e-6 <= gap <= 1e6 for gap in spacing):
        raise PclmixError(
            f"{folder}: its slices have an invalid place or spacing, {spacing} (Z, H, W); export it again"
        )
    array = np.stack([_pixels(files[i][0], files[i][1]) for i in order])[None]
    image = nib.Nifti1Image(np.zeros(array.shape[:0:-1], np.uint8), np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine)
    image.header.set_xyzt_units("mm")
    return Series(array, Geometry(array.shape[1:], spacing, image.header.copy()), tuple(slices))


def convert_series(folder: Path, out: Path) -> tuple[tuple[int, int, int], tuple[float, float, float]]:
    """Write a series as NIfTI with its geometry; returns shape and spacing (Z, H, W)."""
    if not ending_of(out).startswith(".nii"):
        raise PclmixError(f"{out}: the file to write must end in .nii.gz or .nii")
    require_new_file(out)
    if not Path(folder).is_dir():
        raise PclmixError(f"{folder} is not a folder; SERIES is the folder that holds the slices")
    series = read_series(folder)
    write_image(out, series.array[0], series.geometry, "from DICOM")
    return series.geometry.shape, series.geometry.spacing


def write_segmentation(path: Path, labels: npt.NDArray[Any], series: Series, classes: Labels) -> None:
    """Write labels (Z, H, W) of a series as a DICOM segmentation object, one binary segment per foreground class."""
    hd = need_extra("highdicom", "dicom", f"{path}: writing a DICOM segmentation")
    from pydicom.sr.codedict import codes
    from pydicom.uid import generate_uid

    algorithm = hd.AlgorithmIdentificationSequence(
        name="pclmix", version=__version__, family=codes.DCM.ArtificialIntelligence
    )
    descriptions = [
        hd.seg.SegmentDescription(
            segment_number=k,
            segment_label=name,
            segmented_property_category=codes.SCT.AnatomicalStructure,
            # Classes have no standard codes: a private code with the name.
            segmented_property_type=hd.sr.CodedConcept(name[:16], "99PCLMIX", name[:64]),
            algorithm_type="AUTOMATIC",
            algorithm_identification=algorithm,
            display_color=hd.color.CIELabColor.from_rgb(*(int(colour[i : i + 2], 16) for i in (1, 3, 5))),
        )
        for k, (name, colour) in enumerate(zip(classes.foreground, classes.colours()[1:], strict=True), start=1)
    ]
    chosen = np.stack([labels == k for k in range(1, classes.count)], axis=-1)  # (Z, H, W, K - 1)
    segmentation = hd.seg.Segmentation(
        source_images=list(series.slices),
        pixel_array=chosen,
        segmentation_type="BINARY",
        segment_descriptions=descriptions,
        series_instance_uid=generate_uid(),
        series_number=100,
        sop_instance_uid=generate_uid(),
        instance_number=1,
        manufacturer="pclmix",
        manufacturer_model_name="pclmix",
        software_versions=__version__,
        device_serial_number="0",
        series_description="segmentation",
        omit_empty_frames=bool(chosen.any()),
    )
    with atomic_path(path) as temporary:
        segmentation.save_as(temporary)


def _is_dicom(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def _require_one(folder: Path, slices: list[Any]) -> None:
    counts: dict[str, list[Any]] = {}
    for slice_ in slices:
        counts.setdefault(str(slice_.get("SeriesInstanceUID", "none")), []).append(slice_)
    if len(counts) > 1:
        shown = "\n".join(
            f"  {uid}: {len(group)} files, {group[0].get('SeriesDescription', 'no description')}"
            for uid, group in sorted(counts.items())
        )
        raise PclmixError(f"{folder} holds {len(counts)} series; put one into a folder of its own:\n{shown}")


def _frame(files: list[tuple[Path, Any]]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Directions along a row and down a column, and each slice's position (N, 3), in DICOM's axes."""
    first_path, first = files[0]
    shapes = []
    for path, slice_ in files:
        for key, count in _PLACE.items():
            if not slice_.get(key):
                raise PclmixError(f"{path} has no {key}, so it has no place in a volume; export one image per file")
            if np.size(slice_.get(key)) != count:
                raise PclmixError(
                    f"{path}: {key} is {slice_.get(key)}, where {count} numbers are needed; export it again"
                )
        same = np.allclose(slice_.ImageOrientationPatient, first.ImageOrientationPatient, atol=1e-3)
        if not same or not np.allclose(slice_.PixelSpacing, first.PixelSpacing, rtol=1e-4):
            raise PclmixError(f"{first_path} and {path} differ in orientation or pixel spacing; a volume needs one")
        shapes.append((int(slice_.Rows), int(slice_.Columns)))
    if len(set(shapes)) > 1:
        raise PclmixError(f"{first_path.parent}: slices of different sizes, {sorted(set(shapes))}; a volume needs one")
    orientation = np.array([float(v) for v in first.ImageOrientationPatient])
    positions = np.array([[float(v) for v in slice_.ImagePositionPatient] for _, slice_ in files])
    return orientation[:3], orientation[3:], positions


def _step(folder: Path, positions: npt.NDArray[Any], normal: npt.NDArray[Any], slices: list[Any]) -> npt.NDArray[Any]:
    """Distance between slices; a single slice has its slice thickness."""
    if len(positions) == 1:
        return normal * float(slices[0].get("SpacingBetweenSlices") or slices[0].get("SliceThickness") or 1.0)
    gaps = np.diff(positions @ normal)
    if (gaps < 1e-3).any():
        count = len(positions) / len(np.unique((positions @ normal).round(3)))
        raise PclmixError(
            f"{folder}: several images have one position (about {count:.0f} each, the phases of a cine?); "
            "put the slices of one phase into a folder of their own"
        )
    if not np.allclose(gaps, np.median(gaps), rtol=0.05, atol=0.05):
        where = int(np.abs(gaps - np.median(gaps)).argmax())
        raise PclmixError(
            f"{folder}: slices {where} and {where + 1} lie {gaps[where]:.2f} mm apart, the others "
            f"{np.median(gaps):.2f} mm; is a file missing?"
        )
    step: npt.NDArray[Any] = (positions[-1] - positions[0]) / (len(positions) - 1)
    return step


def _bytes(slice_: Any) -> int:
    """Memory of a slice, from its header."""
    sides = (int(slice_.get(key) or 1) for key in ("Rows", "Columns", "NumberOfFrames", "SamplesPerPixel"))
    return math.prod(sides) * max(1, int(slice_.get("BitsAllocated") or 8) // 8)


def _pixels(path: Path, slice_: Any) -> npt.NDArray[Any]:
    try:
        pixels = np.asarray(slice_.pixel_array)
    except Exception as error:  # compression that needs another library, or damaged data
        raise PclmixError(f"{path}: its pixels cannot be read ({error})") from error
    if pixels.ndim != 2:
        raise PclmixError(f"{path} holds pixels of shape {pixels.shape}; one grey slice per file is needed")
    slope, intercept = (float(slice_.get(key) or 0) for key in ("RescaleSlope", "RescaleIntercept"))
    slope = slope or 1.0  # missing or empty
    if (slope, intercept) == (1.0, 0.0):
        return pixels
    return (pixels.astype(np.float32) * slope + intercept).astype(np.float32)
