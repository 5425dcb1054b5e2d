"""The list of cases and how far each is, and images in a form the viewer reads."""

from __future__ import annotations

import gzip
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.io.volume import Geometry, ending_of, read_image
from pclmix.labels import Labels
from pclmix.web.workspace import UnknownError, Workspace, token_of

#: Strokes of the background: its own colour, black, would not be seen on an image.
BACKGROUND_STROKE = "#c3cad6"
RGB = np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])


@dataclass(frozen=True)
class Progress:
    """How much of a case is drawn: voxels by class, slices touched of all, and what is wrong if it cannot be read."""

    voxels: tuple[int, ...]
    size: int
    touched: int
    slices: int
    problem: str = ""


class CaseBook:
    """Progress of every case, read once for each version of its label file."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._known: dict[str, tuple[str, Progress]] = {}
        self._guard = threading.Lock()

    def progress(self, cases: list[str] | None = None) -> dict[str, dict[str, Any]]:
        """Progress by case; files are read in threads, those unchanged since the last time not at all."""
        chosen = list(self.workspace.refresh().cases) if cases is None else cases
        with ThreadPoolExecutor(4) as pool:
            return {case: asdict(found) for case, found in zip(chosen, pool.map(self._one, chosen), strict=True)}

    def drawn(self) -> list[str]:
        """Cases to train on: those with strokes, and those that cannot be read, which training has to name."""
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
    """Names and colours as the page draws them, background first."""
    colours = (BACKGROUND_STROKE, *labels.colours()[1:])
    return [{"name": name, "colour": colour} for name, colour in zip(labels.names, colours, strict=True)]


def is_picture(dataset: Dataset) -> bool:
    """Photographs and the like: no orientation in a patient, and slices only where a TIFF holds a stack."""
    return not dataset.ending.startswith(".nii")


def is_coloured(dataset: Dataset) -> bool:
    """Whether its three channels are the red, green and blue of one file."""
    return len(dataset.channels) == 3 and bool(dataset.cases) and len(dataset.image_paths(dataset.cases[0])) == 1


def image_file(workspace: Workspace, case: str, channel: int | None) -> Path | bytes:
    """One channel for the viewer, or None for all as colour: a file as it is, or the bytes of a NIfTI made from it."""
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
    """(3, Z, H, W) as RGB pixels (Z, H, W) of a byte each; more bits are scaled to the brightest value."""
    if array.dtype != np.uint8:
        top = max(float(array.max()), 1e-9)
        array = np.clip(np.rint(array * (255 / top)), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(np.moveaxis(array, 0, -1)).view(RGB)[..., 0]


def display_nifti(array: npt.NDArray[Any], geometry: Geometry) -> bytes:
    """A map (Z, H, W) as gzipped NIfTI over the grid that the viewer has of the image."""
    data = np.ascontiguousarray(array).transpose(2, 1, 0)
    if data.dtype not in (np.uint8, np.int16, np.float32, RGB):
        data = data.astype(np.uint8 if data.dtype == np.bool_ else np.float32)
    if geometry.header is None:
        z, y, x = geometry.spacing
        image = nib.Nifti1Image(data, np.diag([x, -y, z, 1.0]))  # the first row of a picture is its top
        image.header.set_xyzt_units("mm")
    else:
        header = geometry.header.copy()
        header.set_data_dtype(data.dtype)
        header.set_slope_inter(1, 0)
        header["cal_min"] = header["cal_max"] = 0
        image = nib.Nifti1Image(data, None, header)
    return gzip.compress(image.to_bytes(), compresslevel=1, mtime=0)
