"""One run of a study: train a fold, predict and score its test cases, in this process or as a task on a node."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pclmix.cluster import carry
from pclmix.data.dataset import Dataset
from pclmix.data.store import cache_folder
from pclmix.errors import PclmixError
from pclmix.inference.files import RECORD, predict_files
from pclmix.inference.torch import load
from pclmix.io.files import read_json, write_json
from pclmix.metrics import evaluate
from pclmix.report.training import draw_run
from pclmix.studies.plan import (
    CASES,
    EVALUATION,
    NODE,
    PREDICTIONS,
    Record,
    Run,
    Study,
    beating,
    is_done,
    marker,
    new_record,
    read_record,
    write_record,
)
from pclmix.training.log import write_status
from pclmix.training.request import TrainRequest
from pclmix.training.start import ClaimedError, claimed, run_training

LOG = "console.log"
CLAIM_SECONDS = 60.0  #: seconds for a lost worker's process to end on this host


@dataclass(frozen=True)
class Order:
    """A run of a study with its resources."""

    study: Study  #: on a cluster without its runs
    run: Run
    device: str = "auto"
    devices: int = 1
    cores: int | None = None  #: threads of torch; None leaves them as they are
    attempt: int = 1

    @property
    def folder(self) -> Path:
        """The run's folder in the study, as a path of the driver."""
        return self.study.place(self.run)


@dataclass(frozen=True)
class Places:
    """Local paths of an order's files, and their transfer back to the study."""

    dataset: Path
    folder: Path
    address: str = ""
    carried: bool = False  #: whether the dataset was transferred to this node
    courier: carry.Courier | None = None  #: transfers the run's files if this node cannot write the study's folder


def perform(order: Order, places: Places, console: Console) -> Record:
    """Execute one run and return its record, which has the error of a failed run. Ctrl-C is raised."""
    import torch

    if is_done(places.folder) and (known := read_record(places.folder)) is not None:
        return known
    if order.cores is not None:
        torch.set_num_threads(order.cores)
    record = new_record(
        places.folder,
        device=_device_name(order.device),
        threads=torch.get_num_threads(),
        address=places.address,
        attempt=order.attempt,
    )
    record = replace(record, dataset="carried to the node" if places.carried else "read in place")
    bring = places.courier.carry if places.courier is not None else _nothing
    with beating(places.folder, record, bring):
        record = _ended(order, places, record, console)
    record = replace(record, seen=time.time())
    write_record(places.folder, record)
    return record


def _nothing() -> None:
    return


def _ended(order: Order, places: Places, record: Record, console: Console) -> Record:
    try:
        if not _train(order, places, console):
            return replace(record, status="interrupted")
        return replace(record, status="finished", scored=_score(order, places, console))
    except PclmixError as error:
        return replace(record, status="failed", reason=str(error))
    except KeyboardInterrupt:
        write_record(places.folder, replace(record, status="interrupted"))
        raise
    except Exception as error:  # the other runs continue
        console.print(traceback.format_exc(), highlight=False, markup=False, soft_wrap=True)
        return replace(record, status="failed", reason=f"{type(error).__name__}: {str(error).strip()[:300]}")


def _train(order: Order, places: Places, console: Console) -> bool:
    """True when finished, False when interrupted."""
    settings = order.run.settings
    request = TrainRequest(
        places.dataset,
        places.folder,
        method=settings.method,
        recipe=settings.recipe,
        overrides=settings.overrides,
        fold=order.run.fold,
        resume=True,
        expect_run=False,
        device=order.device,
        devices=order.devices,
    )
    finished = run_training(request, console)
    if finished:
        draw_run(places.folder)
    return finished


def _score(order: Order, places: Places, console: Console) -> bool:
    """Predict the test cases and score those with dense masks; False if there are none."""
    settings, fold, folder = order.run.settings, order.run.fold, places.folder
    component = settings.largest_component
    outcome = predict_files(
        load(folder, device=order.device),
        places.dataset,
        folder / PREDICTIONS,
        fold=fold,
        tta=settings.tta,
        largest_component=component,
    )
    outcome.require_good()
    _name_places(order, places)
    data = Dataset.open(places.dataset)
    if not any(data.has_reference(case) for case in data.fold(fold).test):
        console.print(f"{order.run.name}: no test case has a dense mask, so it is not scored", highlight=False)
        return False
    summary = evaluate(folder / PREDICTIONS, places.dataset, fold=fold, largest_component=component)
    summary = replace(summary, prediction=str(order.folder / PREDICTIONS), reference=str(order.study.dataset))
    summary.write_csv(folder / CASES)
    summary.write_json(folder / EVALUATION)
    return True


def _name_places(order: Order, places: Places) -> None:
    """Replace the node's paths in a run's files by those of the study."""
    if places.folder != order.folder or places.dataset != order.study.dataset:
        write_status(places.folder, dataset=str(order.study.dataset))
        path = places.folder / PREDICTIONS / RECORD
        write_json(path, {**read_json(path), "model": str(order.folder)})


def _device_name(device: str) -> str:
    from pclmix.nets.segmenter import device_kind

    if device_kind(device) == "cpu":
        return "cpu"
    import torch

    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return torch.cuda.get_device_name() + (f" (CUDA_VISIBLE_DEVICES={shown})" if shown else "")


def on_node(order: Order, key: str, depot: Any) -> Record:
    """A task of Ray. `key` is the fingerprint of the driver's dataset; the depot has its files."""
    import ray

    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    try:
        places = _places(order, key, depot, address)
        _wait_until_free(places.folder)
    except (PclmixError, OSError) as error:
        raise PclmixError(f"node {socket.gethostname()} ({address}): {error}") from error
    sys.argv = shlex.split(order.study.command) or sys.argv  # for environment.json, instead of Ray's command
    try:
        with (places.folder / LOG).open("a", encoding="utf-8") as file:
            console = Console(file=file, width=120)
            record = perform(order, places, console)
            if record.status == "failed":
                console.print(f"failed: {record.reason}", highlight=False, markup=False, soft_wrap=True)
            return record
    finally:
        if places.courier is not None:
            places.courier.carry(everything=True)
            shutil.rmtree(places.folder)


def _places(order: Order, key: str, depot: Any, address: str) -> Places:
    """The driver's folders if this node sees them, else copies in its cache."""
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
    # A run counts as done when both exist, so they are written last.
    courier = carry.Courier(
        folder, lambda files: ray.get(depot.store.remote(name, files)), last=(NODE, EVALUATION), held=EVALUATION
    )
    courier.known()
    return Places(dataset, folder, address, not in_place, courier)


def _is_here(study: Study) -> bool:
    """Whether this node sees the study's folder, not another one of the same name."""
    return marker(study.folder, study.id).is_file() and os.access(study.folder, os.W_OK)


def _wait_until_free(folder: Path) -> None:
    """Wait for a lost worker's process, which may outlive its node's disconnection by seconds."""
    until = time.monotonic() + CLAIM_SECONDS
    while True:
        try:
            with claimed(folder):
                return
        except ClaimedError:
            if time.monotonic() > until:
                raise
            time.sleep(1.0)
