"""The part of a study that a node of the cluster executes: find or fetch the files, do the run, return the results."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from pclmix.cluster import carry
from pclmix.data.store import cache_folder
from pclmix.errors import PclmixError
from pclmix.studies.plan import EVALUATION, Study, read_study
from pclmix.studies.record import NODE, Record
from pclmix.studies.work import LOG, Order, Places, perform
from pclmix.training.claim import ClaimedError, claimed

CLAIM_SECONDS = 60.0  #: for the process of a lost worker to end on this host


def on_node(order: Order, key: str, depot: Any) -> Record:
    """A task of Ray. `key` is the fingerprint of the driver's dataset; the depot has its files."""
    import ray

    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    try:
        places = _places(order, key, depot, address)
        _wait_until_free(places.folder)
    except (PclmixError, OSError) as error:
        raise PclmixError(f"node {socket.gethostname()} ({address}): {error}") from error
    sys.argv = shlex.split(order.study.command) or sys.argv  # for environment.json, in place of Ray's own
    try:
        with (places.folder / LOG).open("a", encoding="utf-8") as file:
            return perform(order, places, Console(file=file, width=120))
    finally:
        if places.courier is not None:
            places.courier.carry(everything=True)
            shutil.rmtree(places.folder)


def _places(order: Order, key: str, depot: Any, address: str) -> Places:
    """The driver's own folders where this node has them, else copies in its cache."""
    import ray

    dataset = order.study.dataset
    in_place = carry.sees(dataset, key)
    if not in_place:
        dataset = carry.unpack(dataset.name, key, lambda: carry.take(depot))
    if _is_here(order.study):
        order.folder.mkdir(parents=True, exist_ok=True)
        return Places(dataset, order.folder, address, not in_place)
    name = order.run.folder
    folder = cache_folder() / "runs" / order.study.id / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    carry.write_files(folder, ray.get(depot.fetch.remote(name)))
    # The study takes a run for done when it has these two, so they are written last.
    courier = carry.Courier(
        folder, lambda files: ray.get(depot.store.remote(name, files)), last=(NODE, EVALUATION), held=EVALUATION
    )
    courier.known()
    return Places(dataset, folder, address, not in_place, courier)


def _is_here(study: Study) -> bool:
    """Whether this node writes to the study's own folder, not to another one of the same name."""
    try:
        return read_study(study.folder).id == study.id and os.access(study.folder, os.W_OK)
    except PclmixError:
        return False


def _wait_until_free(folder: Path) -> None:
    """A worker whose node was lost may live a few seconds longer than the news of it."""
    until = time.monotonic() + CLAIM_SECONDS
    while True:
        try:
            with claimed(folder):
                return
        except ClaimedError:
            if time.monotonic() > until:
                raise
            time.sleep(1.0)
