"""`train --dry-run`: what a training would do, its memory and its time, from a few timed steps. Nothing is written."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from pclmix.config import planned_steps
from pclmix.data.check import check_layout
from pclmix.data.store import Store, read_store
from pclmix.nets.segmenter import count_parameters
from pclmix.training.parallel import Process, require_devices
from pclmix.training.plan import Plan, make_plan
from pclmix.training.prepare import Prepared, find_sources
from pclmix.training.request import TrainRequest
from pclmix.training.trainer import Trainer

_CASES = 8  # read for the timed steps
_STEPS, _SECONDS = 10, 20.0  # timed, at most


@dataclass(frozen=True)
class Forecast:
    """What a training would take."""

    cases: int
    slices: int  #: about so many
    parameters: tuple[int, int]  #: of all that is trained, and of the network that predicts
    steps: int  #: still to be trained
    step_seconds: float
    seconds: float  #: of training, without reading the data
    memory: int  #: bytes, on the device


def dry_run(request: TrainRequest, console: Console | None = None) -> Forecast:
    """Plan a training, time a few of its steps on some of its cases and print what it would do."""
    console = console or Console()
    kind = require_devices(request.device, request.devices)
    plan = make_plan(request)
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    # The share of one device; the weights to start from do not change how long a step takes.
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
    """Seconds of one step, the median of a few after the first ones."""
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
    """The peak so far, with all slices in place of those that were read."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return int(peak + store.nbytes * (slices / len(store) - 1))


def _lines(plan: Plan, store: Store, forecast: Forecast, process: Process) -> list[tuple[str, str]]:
    config, dataset = plan.config, plan.dataset
    h, w = config.data.seen
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
            f"{process.device.type}, precision {config.engine.precision}, {torch.get_num_threads()} CPU threads",
        ),
        ("memory", f"about {forecast.memory / 2**30:.1f} GiB"),
        ("time", f"about {duration(forecast.seconds)} of training at {rate}{ranks}"),
    ]
    return [*lines, *(("note", note) for note in plan.notes)]


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> duration(42.0), duration(754.0), duration(7500.0)
    ('42 s', '13 min', '2 h 5 min')
    """
    if seconds < 120:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
