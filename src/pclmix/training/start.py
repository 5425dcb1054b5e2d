"""Entry points of training: `run_training` trains into a run folder, `dry_run` times a few steps."""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from rich.console import Console

from pclmix.config import planned_steps
from pclmix.data.check import check_layout
from pclmix.data.store import Store, cache_folder, read_store
from pclmix.errors import PclmixError
from pclmix.io.files import atomic_path, sweep_leftovers
from pclmix.nets.segmenter import count_parameters
from pclmix.training import optim
from pclmix.training.checkpoint import LAST
from pclmix.training.log import PLAN, duration
from pclmix.training.parallel import Process, gather_objects, join, require_devices, with_torchrun
from pclmix.training.plan import Plan, make_plan, plans_from_data, require_same_cases
from pclmix.training.planner import DataPlan
from pclmix.training.prepare import Prepared, find_sources, prepare
from pclmix.training.request import TrainRequest
from pclmix.training.step import DivergedError
from pclmix.training.trainer import Trainer


class ClaimedError(PclmixError):
    """Another process on this computer trains into the folder."""


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Lock `out` for this process; refused if another process on this computer holds it.

    The lock file is in the cache, so that nothing is left in or beside `out`; the system releases the lock when the
    process ends.
    """
    name = hashlib.blake2b(os.fsencode(Path(out).resolve()), digest_size=16).hexdigest()
    lock = FileLock(cache_folder() / "claimed" / name)
    try:
        (cache_folder() / "claimed").mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise ClaimedError(
            f"another process is training into {out}; wait for it, stop it, or choose another --out"
        ) from None
    except (OSError, NotImplementedError):
        pass  # train also if the cache does not support locks
    try:
        yield
    finally:
        lock.release()


def run_training(request: TrainRequest, console: Console | None = None) -> bool:
    """Train as `pclmix train` does; True when finished, False when interrupted.

    With several devices this process starts one process per device, unless torchrun has done so. Under torchrun rank 0
    returns the result; other ranks return True, since torchrun treats anything else as a failure.
    """
    console = console or Console(stderr=True)
    request = with_torchrun(request)
    if request.world > 1 and not dist.is_torchelastic_launched():
        from pclmix.training.launch import launch

        require_devices(request.device, request.devices)
        if plans_from_data(request):
            return launch(request)
        plan = make_plan(request)  # raises on invalid requests before any process is started
        return _is_finished(plan, console) or launch(request)
    with join(request.device, request.devices) as process, claimed(request.out) if process.first else nullcontext():
        plan = _shared_plan(request, process)
        quiet = console if process.first else Console(quiet=True)
        finished = _is_finished(plan, quiet) or _train(plan, process, quiet)
        if process.first:
            sweep_leftovers(request.out, older=600)
        return finished


def _shared_plan(request: TrainRequest, process: Process) -> Plan:
    """Rank 0 makes the plan before the others, so that an invalid request gives one message."""
    own = make_plan(request) if process.first else None
    planned: DataPlan | None = gather_objects(own and own.planned)[0]
    return own or make_plan(request, planned)


def _is_finished(plan: Plan, console: Console) -> bool:
    if plan.is_finished and plan.checkpoint is not None:
        _say(console, f"{plan.out} is finished already: {plan.checkpoint.step} steps. Nothing to do.")
        return True
    return False


def _train(plan: Plan, process: Process, console: Console) -> bool:
    """Prepare the data, train, and print the outcome."""
    config, out = plan.config, plan.out
    for note in plan.notes:
        _say(console, note)
    imported = optim.preload()
    data = prepare(plan, process, console)
    if plan.checkpoint is not None:
        require_same_cases(plan.checkpoint, data.train.cases, plan.dataset, out)
    imported.join()
    if plan.planned is not None and process.first:
        with atomic_path(out / PLAN) as temporary:
            temporary.write_text(plan.planned.text, encoding="utf-8")
    try:
        finished = Trainer(plan, data, process, console).run()
    except DivergedError:
        if process.first:
            raise
        return True
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        raise PclmixError(
            f"out of memory on {process.device.type} with engine.batch={config.engine.batch} and "
            f"data.size={list(config.data.size)}; make one of them smaller, or choose a smaller net than {config.net}"
        ) from error
    again = plan.request.resume_command()
    _say(console, f"finished: {out / LAST}" if finished else f"stopped and saved. Continue with: {again}")
    return finished or not process.first


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error means lack of memory on the host or the device.

    CUDA, Triton and cuBLAS have their own messages. During graph capture the end of the capture fails too, with the
    first error as its context.
    """
    while error is not None:
        said = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in said):
            return True
        error = error.__cause__ or error.__context__
    return False


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


_CASES = 8  # cases read for the timed steps
_STEPS, _SECONDS = 10, 20.0  # seconds of timed steps at most


@dataclass(frozen=True)
class Forecast:
    """Resources of a training."""

    cases: int
    slices: int  #: approximately
    parameters: tuple[int, int]  #: parameters of all trained modules, and of the inference network
    steps: int  #: remaining steps
    step_seconds: float
    seconds: float  #: seconds of training, without reading the data
    memory: int  #: bytes on the device


def dry_run(request: TrainRequest, console: Console | None = None) -> Forecast:
    """Plan a training, time a few steps on some of its cases and print the forecast."""
    console = console or Console()
    kind = require_devices(request.device, request.devices)
    plan = make_plan(request)
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    # Per device; initial weights do not change the duration of a step.
    process = Process(device, world=request.world)
    encoder = plan.config.encoder.model_copy(update={"weights": "none"})
    config = plan.config.model_copy(update={"encoder": encoder})
    trial = replace(plan, config=config, checkpoint=None, start=None)
    sources = find_sources(plan)
    train = sources.split.train
    chosen = [train[i] for i in np.unique(np.linspace(0, len(train) - 1, _CASES).round().astype(int))]
    store = read_store(plan.dataset, chosen, sources.settings, sources.precompute, check_layout(plan.dataset))
    slices = round(len(store) / len(chosen) * len(train))
    trainer = Trainer(trial, Prepared(store, None), process, Console(quiet=True))
    seconds = _time(trainer)
    forecast = _forecast(plan, trainer, len(train), slices, seconds, _memory(store, slices, device))
    for name, text in _lines(plan, store, forecast, process):
        console.print(f"{name:<9}{text}", highlight=False, soft_wrap=True, markup=False)
    return forecast


def _time(trainer: Trainer) -> float:
    """Seconds of one step: the median after warm-up."""
    wait: Callable[[], Any] = torch.cuda.synchronize if trainer.process.device.type == "cuda" else lambda: None
    first = 5 if trainer.process.device.type == "cuda" else 1  # eager steps, and the capture
    taken: list[float] = []
    while len(taken) < first + _STEPS and (len(taken) <= first or sum(taken[first:]) < _SECONDS):
        started = time.perf_counter()
        trainer.step(len(taken), 0.5)
        wait()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[first:])


def _forecast(plan: Plan, trainer: Trainer, cases: int, slices: int, step: float, memory: int) -> Forecast:
    done, spent = (plan.checkpoint.step, plan.checkpoint.seconds) if plan.checkpoint else (0, 0.0)
    budget = 60 * plan.minutes if plan.minutes is not None else plan.config.engine.seconds
    if budget is None:
        steps = planned_steps(plan.config.model_dump()) - done
        seconds = steps * step
    else:
        seconds = max(0.0, budget - spent)
        steps = round(seconds / step)
    counts = count_parameters(trainer.method), count_parameters(trainer.method.net)
    return Forecast(cases, slices, counts, steps, step, seconds, memory)


def _memory(store: Store, slices: int, device: torch.device) -> int:
    """The peak so far, scaled to all slices."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return int(peak + store.nbytes * (slices / len(store) - 1))


def _lines(plan: Plan, store: Store, forecast: Forecast, process: Process) -> list[tuple[str, str]]:
    config, dataset = plan.config, plan.dataset
    h, w = config.data.seen
    threads = torch.get_num_threads()
    left_out = "" if plan.fold is None else f", without the test cases of fold {plan.fold}"
    trained, net = (f"{count / 1e6:.2f} M" for count in forecast.parameters)
    rate = f"{1 / forecast.step_seconds:.1f} steps a second"
    ranks = f" on each of {process.world} devices, without their communication" if process.world > 1 else ""
    lines = [
        (
            "run",
            f"{plan.out}, which is not written" + (f", from step {plan.checkpoint.step}" if plan.checkpoint else ""),
        ),
        ("data", f"{dataset.name}: {forecast.cases} cases{left_out}, about {forecast.slices} slices"),
        ("classes", ", ".join(dataset.labels.names)),
        ("method", f"{config.method}, recipe {config.recipe}"),
        ("network", f"{config.net}: {trained} parameters are trained, {net} predict"),
        ("weights", config.encoder.weights),
        ("batch", f"{config.engine.batch} images of {h} x {w}"),
        (
            "steps",
            f"{forecast.steps} with {config.optim.name}, learning rate {config.optim.lr:g} to {config.optim.lr_end:g}",
        ),
        (
            "device",
            f"{process.device.type}, precision {config.engine.precision}, {threads} CPU thread{'s'[: threads > 1]}",
        ),
        ("memory", f"about {forecast.memory / 2**30:.1f} GiB"),
        ("time", f"about {duration(forecast.seconds)} of training at {rate}{ranks}"),
    ]
    strokes = plan.planned.strokes if plan.planned else ()
    return [*lines, *(("note", note) for note in (*plan.notes, *strokes))]
