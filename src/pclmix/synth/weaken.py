"""`pclmix scribble`: files of dense masks in, files of weak labels out, geometry kept.

A dataset gives a dataset that can be trained on; a folder of label files gives a folder of label files.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from shlex import quote

import numpy as np

from pclmix.data.dataset import IMAGES, REFERENCE, SCRIBBLES, Dataset, Split, write_dataset_json, write_splits
from pclmix.data.importers.base import listed
from pclmix.errors import PclmixError
from pclmix.io.files import atomic_folder, refuse_existing, require_writable, write_json
from pclmix.io.threads import in_threads
from pclmix.io.volume import ENDINGS, ending_of, read_labels, stem_of, write_labels
from pclmix.labels import IGNORE, Labels, looks_like_image
from pclmix.synth.scribble import Style, case_rng, simulate

_MASK = re.compile(r"(^|_)(?:gt|masks?|labels?|seg)$", re.IGNORECASE)
_SCRIBBLE = re.compile(r"(?:^|_)scribbles?$", re.IGNORECASE)


def weaken(masks: Path, out: Path, style: Style, seed: int = 0, *, show: bool = False) -> tuple[int, str]:
    """Write weak labels for `masks` to `out`; returns how many cases, and what to do next."""
    masks, out = Path(masks), Path(out)
    refuse_existing(out)
    require_writable(out)
    if not masks.exists():
        raise PclmixError(f"{masks} does not exist")
    if not masks.is_dir():
        raise PclmixError(f"{masks} is a file; give the folder that holds the label files, or a dataset folder")
    if (masks / "dataset.json").is_file():
        return _weaken_dataset(Dataset.open(masks), out, style, seed, show)
    return _weaken_folder(masks, out, style, seed, show)


def _weaken_dataset(source: Dataset, out: Path, style: Style, seed: int, show: bool) -> tuple[int, str]:
    """Copies images, splits and dense masks and simulates labelsTr. Cases without a dense mask are left out.

    Dense masks are those in referenceTr or, in a dataset whose labels have no 'ignore', those in labelsTr.
    """
    dense = {c: source.reference_path(c) for c in source.cases if source.has_reference(c)}
    if not dense and source.labels.ignore is None:
        dense = {c: source.scribble_path(c) for c in source.cases if source.scribble_path(c).is_file()}
    if not dense:
        raise PclmixError(
            f"{source.root} has no dense masks to draw from: put them into {source.root / REFERENCE} as "
            f"CASE{source.ending}"
        )
    labels = replace(source.labels, ignore=source.labels.count)
    splits = [Split(*(tuple(c for c in part if c in dense) for part in (s.train, s.test))) for s in source.splits()]
    with atomic_folder(out) as folder:
        for name in (IMAGES, SCRIBBLES, REFERENCE):
            (folder / name).mkdir()

        def work(case: str) -> None:
            for path in source.image_paths(case):
                _copy(path, folder / IMAGES)
            sidecar = source.root / IMAGES / f"{case}.json"
            if sidecar.is_file():
                _copy(sidecar, folder / IMAGES)
            for target in (REFERENCE, SCRIBBLES):
                _copy_sidecar(dense[case], folder / target)
            _copy(dense[case], folder / REFERENCE)
            array, geometry = read_labels(dense[case])
            drawn = simulate(source.labels.decode(array, str(dense[case])), style, case_rng(seed, case))
            write_labels(folder / SCRIBBLES / f"{case}{source.ending}", labels.encode(drawn), geometry, labels.names)

        in_threads(work, sorted(dense), "drawing", show=show)
        write_dataset_json(
            folder,
            channels=source.channels,
            labels=labels,
            ending=source.ending,
            cases=len(dense),
            name=source.name,
            patient_pattern=source.patient_pattern,
            description=f"drawn from masks: {style.kind}, amount {style.amount:g}, width {style.width}, "
            f"border {style.border:g}, seed {seed}",
        )
        write_splits(folder, [s for s in splits if s.test])
    left = len(source.cases) - len(dense)
    note = f" ({left} {'case' if left == 1 else 'cases'} without a dense mask left out)" if left else ""
    return len(dense), f"a complete dataset{note}; next: pclmix check {quote(str(out))}"


def _weaken_folder(masks: Path, out: Path, style: Style, seed: int, show: bool) -> tuple[int, str]:
    """Label files anywhere below `masks`; where some are named NAME_gt (_mask, _label, _seg), only those are masks.

    The ignore label is the highest value of all files plus one. NAME_gt becomes NAME_scribble, other names stay.
    """
    files, left_out = _mask_files(masks)
    ignore = 1 + max(in_threads(_highest, files, "reading", show=show))
    labels = Labels.generic(ignore)

    with atomic_folder(out) as folder:

        def work(path: Path) -> None:
            stem = stem_of(path)
            name = _MASK.sub(r"\1scribble", stem) + path.name[len(stem) :]
            target = folder / path.relative_to(masks).with_name(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            array, geometry = read_labels(path)
            # Includes the folder: several folders may have files of the same name.
            case = (path.relative_to(masks).parent / _MASK.sub("", stem)).as_posix()
            drawn = simulate(array, style, case_rng(seed, case))
            write_labels(target, np.where(drawn == IGNORE, ignore, drawn), geometry)
            if not ending_of(path).startswith(".nii") and geometry.unit == "mm":
                write_json(target.with_name(f"{stem_of(target)}.json"), {"spacing": list(geometry.spacing)})

        in_threads(work, files, "drawing", show=show)
    flat = all(path.parent == masks for path in files)
    drawn, dense = quote(str(out)), quote(str(masks))
    kind, more = ("folder IMAGES", f" --masks {dense}") if flat else (f"KIND {dense}", "")
    way = f"pclmix import {kind} DATASET --scribbles {drawn}{more}"
    note = f" ({listed(left_out)} not named as masks and left out)" if left_out else ""
    return len(files), f"{labels.count} classes, {ignore} where nothing is drawn{note}; next: {way}"


def _mask_files(masks: Path) -> tuple[list[Path], list[Path]]:
    """The masks below a folder, and files that are neither masks nor their images or scribbles.

    If some files are named as masks, the others must be their images or scribbles.
    """
    files = sorted(p for p in masks.rglob("*") if ending_of(p) and p.is_file() and not p.name.startswith("."))
    if not files:
        raise PclmixError(f"{masks} holds no label files; known endings are {', '.join(ENDINGS)}")
    named = [path for path in files if _MASK.search(stem_of(path))]
    if not named:
        return files, []
    known = {(path.parent, _MASK.sub("", stem_of(path))) for path in named}
    others = [p for p in files if not _MASK.search(stem_of(p))]
    others = [p for p in others if not {(p.parent, _SCRIBBLE.sub("", stem_of(p))), (p.parent, "")} & known]
    if len(others) > len(named):
        raise PclmixError(
            f"{masks}: {len(named)} files are named as masks, such as {named[0]}, and {len(others)} are neither that "
            f"nor an image of one ({listed(others)}); name all masks NAME_mask, or give a folder with masks alone"
        )
    return named, others


def _highest(path: Path) -> int:
    array, _ = read_labels(path)
    if array.min() < 0:
        raise PclmixError(f"{path}: label value {array.min()} is below 0; classes are 0 (background), 1, 2, ...")
    highest = int(array.max())
    if highest >= 1000 or looks_like_image(array):
        raise PclmixError(f"{path}: label value {highest} is no class; is it an image rather than a mask?")
    return highest


def _copy(path: Path, folder: Path) -> None:
    if not path.is_file():
        raise PclmixError(f"{path} does not exist; `pclmix check` lists what else is missing")
    shutil.copyfile(path, folder / path.name)


def _copy_sidecar(path: Path, folder: Path) -> None:
    """TIFF has its spacing in NAME.json beside it."""
    sidecar = path.with_name(f"{stem_of(path)}.json")
    if sidecar.is_file():
        shutil.copyfile(sidecar, folder / sidecar.name)
