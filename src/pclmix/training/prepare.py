"""Check and prepare the training cases of a run. The test fold is never opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from pclmix.data.case import Source
from pclmix.data.check import check_layout
from pclmix.data.dataset import Dataset, Split, validation_cut
from pclmix.data.store import Precompute, Settings, Store, cache_folder, map_store, open_store
from pclmix.errors import PclmixError
from pclmix.io.files import require_writable
from pclmix.methods.base import find_method
from pclmix.training.parallel import Process, gather_objects
from pclmix.training.plan import Plan, training_cases


@dataclass(frozen=True)
class Prepared:
    """The training slices and, optionally, those of validation patients."""

    train: Store
    validation: Store | None

    @property
    def folders(self) -> tuple[Path | None, Path | None]:
        return self.train.folder, None if self.validation is None else self.validation.folder


@dataclass(frozen=True)
class Sources:
    """Training and validation cases (`test`), and the preprocessing settings."""

    split: Split
    settings: Settings
    precompute: Precompute | None


def prepare(plan: Plan, process: Process, console: Console) -> Prepared:
    """Check the training cases and open their stores. On each node the first rank reads the files."""
    data = _read(plan, console) if process.local_rank == 0 else None
    found = gather_objects(None if data is None else data.folders)
    if data is not None:
        return data
    train, held = found[process.rank - process.local_rank]
    return Prepared(map_store(train, plan.dataset), None if held is None else map_store(held, plan.dataset))


def find_sources(plan: Plan) -> Sources:
    """The cases of a plan; refused if there are none or if required dense masks are missing."""
    dataset, config, data = plan.dataset, plan.config, plan.config.data
    cases = training_cases(dataset, plan.fold, plan.request.cases)
    method = find_method(config.method)
    source: Source = "reference" if method.needs == "dense masks" else "scribble"
    if source == "reference":
        _require_masks(dataset, cases, config.method)
    split = validation_cut(cases, data.validation, config.seed, dataset.patient_pattern)
    maps = config.method if method.has_maps() else ""
    settings = Settings(data.size, data.intensity, data.aspect, source, maps, window=data.window)
    return Sources(split, settings, method.precompute if maps else None)


def _read(plan: Plan, console: Console) -> Prepared:
    _require_cache()
    dataset, sources = plan.dataset, find_sources(plan)
    common: Any = {"progress": _bar("preparing", console), "found": check_layout(dataset)}
    train = open_store(dataset, sources.split.train, sources.settings, precompute=sources.precompute, **common)
    _require_classes(train, dataset)
    say_kept(train, dataset, console)
    held = None
    if sources.split.test:
        settings = replace(sources.settings, source="scribble", maps="")
        held = open_store(dataset, sources.split.test, settings, **common)
    if dataset.files is not None:
        dataset.files.clear()
    return Prepared(train, held)


def say_kept(store: Store, dataset: Dataset, console: Console) -> None:
    """Print the share of strokes preserved at working size, and the lost classes by case."""
    h, w = store.images.shape[-2:]
    text = f"{store.kept_share:.1%} of the drawn pixels are kept at {h} x {w}"
    names, gone = dataset.labels.names, np.argwhere((store.drawn > 0) & ~store.shown)
    lost = [f"{names[k]} in {store.cases[c]}" for c, k in gone]
    if lost:
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        text += f"; warning: no stroke is left of {', '.join(lost[:5])}{more}: use a larger data.size"
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def _require_cache() -> None:
    """Refuse an unwritable cache folder before the work."""
    if cache_folder().is_file():
        raise PclmixError(f"{cache_folder()} is a file; prepared slices are kept in a folder: set PCLMIX_CACHE to one")
    try:
        require_writable(cache_folder())
    except PclmixError as error:
        raise PclmixError(
            f"{error}: prepared slices are kept there, unless PCLMIX_CACHE names another folder"
        ) from error


def _require_masks(dataset: Dataset, cases: tuple[str, ...], method: str) -> None:
    missing = [case for case in cases if not dataset.has_reference(case)]
    if missing:
        dense = "" if dataset.labels.ignore is not None else "; where labelsTr is dense, --method pce trains on it"
        raise PclmixError(
            f"--method {method} trains on dense masks, and {len(missing)} of {len(cases)} cases have none: "
            f"{dataset.reference_path(missing[0])} does not exist{dense or '; add it, or use another method'}"
        )


def _bar(title: str, console: Console) -> Callable[[Iterable[Any], int], Iterable[Any]]:
    quiet = not console.is_terminal
    return lambda items, total: track(items, title, total, console=console, disable=quiet, transient=True)


def _require_classes(store: Store, dataset: Dataset) -> None:
    missing = [dataset.labels.names[k] for k in np.flatnonzero(~store.shown.any(axis=0))]
    if missing:
        raise PclmixError(
            f"{dataset.root}: no scribble of class {', '.join(missing)} in any training case; "
            "draw some, or remove the class from dataset.json"
        )
