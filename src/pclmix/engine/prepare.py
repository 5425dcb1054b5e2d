"""Before the loop: the cases of a run, checked and prepared. The test fold is never opened here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from pclmix.config import Config
from pclmix.data.check import require_sound
from pclmix.data.dataset import Dataset
from pclmix.data.splits import validation_cut
from pclmix.data.store import Settings, Source, Store, cache_folder, content_key, open_store
from pclmix.errors import PclmixError
from pclmix.files import atomic_path, require_writable
from pclmix.methods.base import Method, find_method


@dataclass(frozen=True)
class Prepared:
    """The slices to train on and, where asked for, those of held-out training patients."""

    fold: int | None
    cases: tuple[str, ...]
    train: Store
    validation: Store | None


def prepare(
    dataset: Dataset, config: Config, fold: int | None, console: Console, only: Sequence[str] | None = None
) -> Prepared:
    """Check the training cases, or `only` these of them, and open their stores.

    Called before processes are launched, so that a bad dataset ends one process with one message and launched ones
    find the work done. Those that torchrun or Slurm start together check once a node, and whoever is first with a
    store leaves it to all.
    """
    cases = training_cases(dataset, fold, only)
    _require_cache()
    method = find_method(config.method)
    if _source(method) == "reference":
        _require_masks(dataset, cases, config.method)
    leader = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"
    if leader:
        _require_sound_once(dataset, cases, _source(method), console)
    split = validation_cut(cases, config.data.validation, config.seed, dataset.patient_pattern)
    show = _bar("preparing", console, quiet=not (leader and console.is_terminal))
    maps = config.method if method.has_maps() else ""
    settings = Settings(config.data.size, config.data.intensity, _source(method), maps)
    precompute = method.precompute if maps else None
    store = open_store(dataset, split.train, settings, precompute=precompute, progress=show)
    _require_classes(store, dataset)
    held = None
    if split.test:
        held = open_store(dataset, split.test, Settings(config.data.size, config.data.intensity), progress=show)
    return Prepared(fold, split.train, store, held)


def training_cases(dataset: Dataset, fold: int | None, only: Sequence[str] | None = None) -> tuple[str, ...]:
    """All cases, or those that a fold does not test, or `only` these of them; refused where there is none."""
    cases = dataset.cases if fold is None else dataset.fold(fold).train
    if only is not None:
        wanted = set(only)
        cases = tuple(case for case in cases if case in wanted)
    if not cases:
        where = f" in fold {fold}; `pclmix split` makes other folds, of two patients or more" if fold else ""
        raise PclmixError(f"{dataset.root}: there is no case to train on{where}")
    return cases


def _require_cache() -> None:
    """Prepared slices are kept in a cache, which may lie where nobody thought of: say so before the work."""
    if cache_folder().is_file():
        raise PclmixError(f"{cache_folder()} is a file; prepared slices are kept in a folder: set PCLMIX_CACHE to one")
    try:
        require_writable(cache_folder())
    except PclmixError as error:
        raise PclmixError(
            f"{error}: prepared slices are kept there, unless PCLMIX_CACHE names another folder"
        ) from error


def _require_sound_once(dataset: Dataset, cases: tuple[str, ...], source: Source, console: Console) -> None:
    """The checks of `pclmix check` on these cases; files that passed before, byte for byte, are not read again."""
    passed = cache_folder() / "checked" / content_key(dataset, cases, Settings((0, 0), source=source))
    if passed.is_file():
        require_sound(dataset, (), show=False)  # layout and folds may have changed: they are no file's content
        return
    require_sound(dataset, cases, references=source == "reference", show=console.is_terminal)
    with atomic_path(passed) as temporary:
        temporary.write_text(f"{dataset.name}: {len(cases)} cases\n", encoding="utf-8")


def _require_masks(dataset: Dataset, cases: tuple[str, ...], method: str) -> None:
    missing = [case for case in cases if not dataset.has_reference(case)]
    if missing:
        dense = "" if dataset.labels.ignore is not None else "; where labelsTr is dense, --method pce trains on it"
        raise PclmixError(
            f"--method {method} trains on dense masks, and {len(missing)} of {len(cases)} cases have none: "
            f"{dataset.reference_path(missing[0])} does not exist{dense or '; add it, or use another method'}"
        )


def _source(method: type[Method]) -> Source:
    return "reference" if method.needs == "dense masks" else "scribble"


def _bar(title: str, console: Console, quiet: bool) -> Callable[[Iterable[Any], int], Iterable[Any]]:
    return lambda items, total: track(items, title, total, console=console, disable=quiet, transient=True)


def _require_classes(store: Store, dataset: Dataset) -> None:
    absent = set(range(len(dataset.labels.names)))
    for labels in store.labels:  # mapped from disk: the first few slices have them all as a rule
        if not absent:
            break
        absent.difference_update(np.unique(labels[0]).tolist())
    if absent:
        missing = [dataset.labels.names[k] for k in sorted(absent)]
        raise PclmixError(
            f"{dataset.root}: no scribble of class {', '.join(missing)} in any training case; "
            "draw some, or remove the class from dataset.json"
        )
