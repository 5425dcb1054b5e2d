"""The list of cases with their progress, images in a form the viewer reads, and thumbnails."""

from __future__ import annotations

import gzip
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from glob import escape
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from PIL import Image

from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.io.files import atomic_path
from pclmix.io.volume import Geometry, ending_of, read_image
from pclmix.labels import Labels
from pclmix.web.workspace import UnknownError, Workspace, is_full, token_of

#: Colour of background strokes: black would not be visible on an image.
BACKGROUND_STROKE = "#c3cad6"
SIDE = 96  #: pixels of the longer side; displayed at half this size
_TAILS = (1, 99)  # percentiles of the slice mapped to black and white
RGB = np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])


@dataclass(frozen=True)
class Progress:
    """How much of a case is annotated: voxels per class, slices with strokes, and the error if it cannot be read."""

    voxels: tuple[int, ...]
    size: int
    touched: int
    slices: int
    problem: str = ""


class CaseIndex:
    """Progress of every case, cached per version of its label file."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._known: dict[str, tuple[str, Progress]] = {}
        self._guard = threading.Lock()

    def progress(self, cases: list[str] | None = None) -> dict[str, dict[str, Any]]:
        """Progress per case; changed files are read in threads, unchanged ones come from the cache."""
        chosen = list(self.workspace.refresh().cases) if cases is None else cases
        with ThreadPoolExecutor(4) as pool:
            return {case: asdict(found) for case, found in zip(chosen, pool.map(self._one, chosen), strict=True)}

    def drawn(self) -> list[str]:
        """Cases to train on: those with strokes, and unreadable ones, which training reports by name."""
        return [case for case, found in self.progress().items() if any(found["voxels"]) or found["problem"]]

    def _one(self, case: str) -> Progress:
        labels = self.workspace.dataset.labels
        try:
            path = self.workspace.scribble_path(case)
            version = token_of(path)
            known = self._known.get(case)
            if known is not None and known[0] == version:
                return known[1]
            if version == "none":
                found = Progress((0,) * labels.count, 0, 0, 0)
            else:
                found = measure(self.workspace.dataset.read_scribble(case)[0], labels)
        except PclmixError as error:
            return Progress((0,) * labels.count, 0, 0, 0, str(error))
        with self._guard:
            self._known[case] = (version, found)
        return found


def measure(array: npt.NDArray[Any], labels: Labels) -> Progress:
    """Progress of one label map (Z, H, W) with IGNORE."""
    counts = np.bincount((array + 1).ravel(), minlength=labels.count + 1)
    touched = int((array >= 0).any(axis=(1, 2)).sum())
    return Progress(tuple(counts[1:].tolist()), int(array.size), touched, int(array.shape[0]))


def classes(labels: Labels) -> list[dict[str, Any]]:
    """Names and colours as shown on the page, background first."""
    colours = (BACKGROUND_STROKE, *labels.colours()[1:])
    return [{"name": name, "colour": colour} for name, colour in zip(labels.names, colours, strict=True)]


def is_picture(dataset: Dataset) -> bool:
    """Whether the images are 2-D picture files: no patient orientation; slices only in a TIFF stack."""
    return not dataset.ending.startswith(".nii")


def is_coloured(dataset: Dataset) -> bool:
    return dataset.is_colour


def image_file(workspace: Workspace, case: str, channel: int | None) -> Path | bytes:
    """One channel for the viewer, or all as RGB for None: the file itself, or the bytes of a NIfTI made from it."""
    count = len(workspace.dataset.channels)
    if channel is not None and not 0 <= channel < count:
        raise UnknownError(f"this dataset has the channels 0 to {count - 1}")
    paths = workspace.image_paths(case)
    path = paths[channel or 0] if len(paths) > 1 else paths[0]
    if not path.is_file():
        raise UnknownError(f"{path.name} does not exist; add the image to imagesTr")
    if ending_of(path).startswith(".nii"):
        return path
    volume = read_image(path)
    if channel is None and len(volume.array) == 3:
        return display_nifti(as_colour(volume.array), volume.geometry)
    plane = volume.array[channel if channel and len(paths) == 1 and len(volume.array) > channel else 0]
    return display_nifti(plane, volume.geometry)


def as_colour(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(3, Z, H, W) as 8-bit RGB (Z, H, W); other types are scaled by their maximum."""
    if array.dtype != np.uint8:
        top = max(float(array.max()), 1e-9)
        array = np.clip(np.rint(array * (255 / top)), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(np.moveaxis(array, 0, -1)).view(RGB)[..., 0]


def display_nifti(array: npt.NDArray[Any], geometry: Geometry) -> bytes:
    """A map (Z, H, W) as gzipped NIfTI on the grid of the image as the viewer shows it."""
    data = np.ascontiguousarray(array).transpose(2, 1, 0)
    if data.dtype not in (np.uint8, np.int16, np.float32, RGB):
        data = data.astype(np.uint8 if data.dtype == np.bool_ else np.float32)
    if geometry.header is None:
        z, y, x = geometry.spacing
        image = nib.Nifti1Image(data, np.diag([x, -y, z, 1.0]))  # row 0 of a picture is at the top
        image.header.set_xyzt_units("mm")
    else:
        header = geometry.header.copy()
        header.set_data_dtype(data.dtype)
        header.set_slope_inter(1, 0)
        header["cal_min"] = header["cal_max"] = 0
        image = nib.Nifti1Image(data, None, header)
    return gzip.compress(image.to_bytes(), compresslevel=1, mtime=0)


def thumbnail(workspace: Workspace, case: str) -> bytes:
    """PNG of a case, cached in .pclmix/thumbnails until its image changes."""
    source = workspace.image_paths(case)[0]
    kept = workspace.internal("thumbnails", f"{case}-{token_of(source)}.png")
    if kept.is_file():
        return kept.read_bytes()
    content = _draw(source)
    for old in kept.parent.glob(f"{escape(case)}-*-*-*.png") if kept.parent.is_dir() else ():
        old.unlink(missing_ok=True)
    try:
        with atomic_path(kept) as temporary:
            temporary.write_bytes(content)
    except Exception as error:
        if not is_full(error):
            raise
    return content


def _draw(source: Path) -> bytes:
    volume = read_image(source)
    middle = volume.array[:, volume.array.shape[1] // 2 : volume.array.shape[1] // 2 + 1]
    plane: npt.NDArray[Any]
    if len(middle) == 3:
        plane = as_colour(middle)[0].view(np.uint8).reshape(*middle.shape[2:], 3)
        size = middle.shape[2:]
    else:
        grey = middle[0, 0].astype(np.float32)
        low, high = np.percentile(grey, _TAILS)
        plane = np.clip((grey - low) * (255 / max(float(high - low), 1e-9)), 0, 255).astype(np.uint8)
        size = tuple(n * s for n, s in zip(grey.shape, volume.geometry.spacing[1:], strict=True))
    scale = SIDE / max(size)
    picture = Image.fromarray(plane).resize((max(1, round(size[1] * scale)), max(1, round(size[0] * scale))))
    if source.name.lower().endswith((".nii", ".nii.gz")):
        picture = _upright(picture, volume.geometry.affine)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _upright(picture: Image.Image, affine: npt.NDArray[Any]) -> Image.Image:
    """Orient as the page does: anterior or superior up, the patient's left on the right."""
    direction = affine[:3, :2] / np.maximum(np.linalg.norm(affine[:3, :2], axis=0), 1e-9)
    column, row = (int(np.abs(direction[:, k]).argmax()) for k in (0, 1))
    signs = [float(direction[column, 0]), float(direction[row, 1])]
    if column > row:  # the vertical anatomical axis runs along columns
        picture = picture.transpose(Image.Transpose.TRANSPOSE)
        column, row, signs = row, column, signs[::-1]
    if (column == 0) == (signs[0] > 0):  # x is mirrored (radiological), y and z are not
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if signs[1] > 0:
        picture = picture.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    return picture
