"""WSL4MIS: HDF5 volumes (ACDC_training_volumes/CASE.h5) with image, scribble and label as (Z, H, W)."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pclmix.data.dataset import IMAGES, REFERENCE, SCRIBBLES
from pclmix.data.importers.acdc import HABITS, LABELS
from pclmix.data.importers.base import IMPORTERS, Options, Plan, listed, need_folder, translate
from pclmix.errors import PclmixError, need_extra
from pclmix.io.files import require_size
from pclmix.io.volume import Array, Geometry, read_image, stem_of, write_image, write_labels

ENDING = ".nii.gz"
_SLICE = re.compile(r"_slice_\d+$")


@IMPORTERS.register("wsl4mis")
def plan(source: Path, options: Options) -> Plan:
    """Every volume below `source` (files of single slices are skipped); spacing from --nifti, else 1 mm."""
    options.only("wsl4mis", "nifti", "ignore")
    volumes: dict[str, Path] = {}
    for path in sorted(source.rglob("*.h5")):
        if path.name.startswith(".") or _SLICE.search(path.stem):
            continue
        if volumes.setdefault(path.stem, path) != path:
            raise PclmixError(f"{volumes[path.stem]} and {path} are the same case twice; import one folder alone")
    if not volumes:
        raise PclmixError(f"{source} holds no HDF5 volumes; give the folder ACDC_training_volumes")
    originals = _originals(options.nifti) if options.nifti is not None else {}
    if options.nifti is not None:
        missing = sorted(set(volumes) - set(originals))
        if missing:
            raise PclmixError(
                f"{options.nifti} has no original for {listed(missing)}; leave --nifti out or complete it"
            )
        notes: tuple[str, ...] = ()
    else:
        notes = ("these files hold no spacing: 1 mm is written. Give the original NIfTI files with --nifti to keep it",)
    values = {k: k for k in range(LABELS.count)}
    ignore = 4 if options.ignore is None else options.ignore
    write = partial(_write, volumes, originals, {**values, ignore: 4}, values)
    return Plan(("MRI",), LABELS, ENDING, tuple(volumes), write, notes, {"name": "ACDC", "habits": HABITS})


def _originals(folder: Path) -> dict[str, Path]:
    need_folder(folder)
    return {stem_of(path): path for path in sorted([*folder.rglob("[!.]*.nii"), *folder.rglob("[!.]*.nii.gz")])}


def _write(
    volumes: dict[str, Path],
    originals: dict[str, Path],
    scribble: dict[int, int],
    mask: dict[int, int],
    case: str,
    folder: Path,
) -> None:
    path = volumes[case]
    arrays = read_volume(path)
    shape = arrays["image"].shape
    grid = (int(shape[0]), int(shape[1]), int(shape[2]))
    geometry = Geometry(grid, (1.0, 1.0, 1.0))
    if case in originals:
        geometry = read_image(originals[case]).geometry
        if geometry.shape != grid:
            raise PclmixError(f"{path} is {grid} (Z, H, W) but its original {originals[case]} is {geometry.shape}")
    write_image(folder / IMAGES / f"{case}_0000{ENDING}", arrays["image"], geometry)
    write_labels(
        folder / SCRIBBLES / f"{case}{ENDING}", translate(arrays["scribble"], scribble, f"{path}: scribble"), geometry
    )
    if "label" in arrays:
        write_labels(
            folder / REFERENCE / f"{case}{ENDING}", translate(arrays["label"], mask, f"{path}: label"), geometry
        )


def read_volume(path: Path) -> dict[str, Array]:
    """image in its own type, scribble and (if present) label as whole numbers, all (Z, H, W).

    HDF5 can refer to other files; those are not read.
    """
    h5py = need_extra("h5py", "hdf5", f"{path}: reading HDF5")
    try:
        with h5py.File(path, "r") as file:
            found = [name for name in ("image", "scribble", "label") if name in file]
            for name in found:
                if not isinstance(file.get(name, getlink=True), h5py.HardLink):
                    raise PclmixError(f"{path}: '{name}' is a link; store the values in the file itself")
                data = file[name]
                if not isinstance(data, h5py.Dataset) or data.dtype.kind not in "biuf" or data.size is None:
                    raise PclmixError(f"{path}: '{name}' must be an array of numbers; export the volume again")
                if data.is_virtual or data.external:
                    raise PclmixError(f"{path}: '{name}' has its values in another file; store them in the file itself")
                require_size(path, int(data.size) * data.dtype.itemsize)
            arrays: dict[str, Any] = {name: np.asarray(file[name]) for name in found}
    except PclmixError:
        raise
    except Exception as error:  # HDF5 raises many types of errors for damaged files
        raise PclmixError(f"{path} cannot be read as HDF5: {error}; copy it again from its source") from error
    for name in ("image", "scribble"):
        if name not in arrays:
            raise PclmixError(f"{path}: '{name}' is missing; the importer needs volumes with image and scribble")
    image = arrays["image"]
    if image.ndim != 3 or image.size == 0:
        raise PclmixError(f"{path}: image has the shape {image.shape}; (Z, H, W) is needed")
    if not np.isfinite(image).all():
        raise PclmixError(f"{path}: the image has voxels that are NaN or infinite; repair it before using it")
    if image.dtype == np.float16:  # NIfTI has no float16; float32 holds all its values
        arrays["image"] = image.astype(np.float32)
    for name in arrays.keys() - {"image"}:
        if arrays[name].shape != image.shape:
            raise PclmixError(f"{path}: {name} is {arrays[name].shape} but image is {image.shape} (Z, H, W)")
        if not np.isfinite(arrays[name]).all() or not (arrays[name] == np.round(arrays[name])).all():
            raise PclmixError(f"{path}: {name} must hold whole numbers; this one holds fractions")
        if arrays[name].dtype.kind not in "iu":
            arrays[name] = arrays[name].astype(np.int64)
    return arrays
