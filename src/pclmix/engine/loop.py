"""The training loop, for every method, on one device or many."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pclmix.config import Config
from pclmix.data.dataset import Dataset
from pclmix.data.hull import hull_shares
from pclmix.distributed import Process, broadcast_state, gather_objects, largest
from pclmix.engine.checkpoint import LAST, SNAPSHOTS, save_checkpoint, save_snapshot
from pclmix.engine.display import Display
from pclmix.engine.feed import Feed
from pclmix.engine.finish import CASES, EXAMPLES, LOSSES, finish_run
from pclmix.engine.optim import Optimizer, WeightAverage, learning_rate
from pclmix.engine.prepare import Prepared
from pclmix.engine.runlog import CONFIG, ENVIRONMENT, METRICS, RUN, MetricLog, start_run, write_status
from pclmix.engine.selfcheck import use_plain_kernels_if_fused_disagree
from pclmix.engine.state import Position, about, random_state, restore
from pclmix.engine.step import TrainStep
from pclmix.engine.validate import scribble_scores
from pclmix.errors import PclmixError
from pclmix.files import sweep
from pclmix.methods.base import Method, build_method
from pclmix.nets.batchnorm import synchronise_batchnorm
from pclmix.nets.pretrained import load_encoder_weights
from pclmix.nets.segmenter import Segmenter


def train(
    dataset: Dataset,
    data: Prepared,
    run: Path,
    config: Config,
    content: dict[str, Any] | None,
    process: Process,
    console: Console,
) -> bool:
    """Train into the folder `run`; True when it is finished, False when it was interrupted and can go on.

    `process` is this one among those that train together. `content` is the checkpoint to go on from, or None.
    """
    device, first = process.device, process.first
    torch.manual_seed(config.seed)  # every rank builds the same networks
    method = build_method(config, len(dataset.channels), dataset.labels.count, len(data.train))
    if content is None:
        for name in method.inference_nets:
            net = method.get_submodule(name)
            assert isinstance(net, Segmenter)
            load_encoder_weights(net.encoder, config.encoder.weights, len(dataset.channels))
    method = place(method, config, process)
    optimizer = Optimizer(method.parameters(), config.optim, device)
    average = WeightAverage(method, config.engine.ema) if config.engine.ema > 0 else None
    torch.manual_seed(config.seed + 1_000_003 * process.rank)  # dropout differs between ranks
    generator = torch.Generator(device).manual_seed(config.seed + 7 + 1_000_003 * process.rank)
    feed = Feed(data.train, config.engine.batch, config.seed, device, process.rank, process.world)
    graph = config.engine.graph and device.type == "cuda" and process.world == 1
    shares = hull_shares(config.data, dataset.labels)
    step = TrainStep(method, optimizer, average, feed, data.train.maps, config, generator, graph, shares)
    position = restore(content, method, optimizer, average, generator, process) if content else Position()
    if device.type == "cuda" and config.engine.precision == "bf16":
        use_plain_kernels_if_fused_disagree(step, position.step, position.progress(config))
    words = about(dataset, config, data.cases, data.fold, data.train)

    def weights() -> dict[str, Any]:
        state = {"method": method.state_dict(), "average": average.state_dict() if average is not None else None}
        return {**words, **state, "step": position.step, "seconds": position.seconds}

    def save() -> None:
        step.require_finite()
        step.require_finite_weights(position.step)
        random = gather_objects(random_state(generator, device))
        if first:
            save_checkpoint(run, {**weights(), "optimizer": optimizer.state_dict(), "random": random})

    def keep() -> None:
        step.require_finite_weights(position.step)
        if first:
            save_snapshot(run, weights(), method.inference_nets)

    def scores() -> dict[str, float]:
        return {} if data.validation is None else scribble_scores(method, data.validation, device)

    if first:
        for name in (LAST, CONFIG, ENVIRONMENT, RUN, METRICS, LOSSES, EXAMPLES, CASES):
            sweep(run / name)
        sweep(run / SNAPSHOTS / "step-*.ckpt")
        start_run(run, config, str(device))
        write_status(run, status="running", step=position.step, dataset=str(dataset.root.resolve()), fold=data.fold)
    try:
        finished = _iterate(step, config, position, run, save, keep, scores, console, first)
    except PclmixError as error:
        if first:
            with suppress(PclmixError):  # a full disk has been reported already
                write_status(run, status="failed", step=position.step, reason=str(error))
        raise
    if first:
        if finished:
            finish_run(run, dataset.labels, data.train, device)
        status = "finished" if finished else "interrupted"
        write_status(run, status=status, step=position.step, seconds=round(position.seconds, 3))
    return finished


def _iterate(
    step: TrainStep,
    config: Config,
    position: Position,
    run: Path,
    save: Callable[[], None],
    keep: Callable[[], None],
    scores: Callable[[], dict[str, float]],
    console: Console,
    first: bool,
) -> bool:
    """Steps until the budget is spent or somebody asks to stop; True when it was spent."""
    engine = config.engine
    log = closing(MetricLog(run, position.step)) if first else nullcontext()
    before = Position(position.step, position.seconds)
    started = time.perf_counter() - position.seconds
    with _stop_on_signal() as stopped, Display(config.method, console, quiet=not first) as display, log as metrics:

        def clock() -> tuple[float, bool]:
            # One clock and one decision to stop for all ranks: otherwise they would end at different steps.
            seconds, stop = largest([time.perf_counter() - started, float(len(stopped))], step.feed.device)
            return seconds, stop > 0

        stop = False
        while position.progress(config) < 1.0 and not stop:
            step(position.step, position.progress(config))
            position.step += 1
            position.seconds, stop = clock()
            over = position.progress(config) >= 1.0
            due = position.step % engine.save_every == 0
            kept = engine.keep_every > 0 and position.step % engine.keep_every == 0
            if position.step % engine.log_every == 0 or due or kept or over:
                values = step.read()  # waits for the device, so the clock below is honest
                step.require_finite()
                position.seconds, stop = clock()
                rate = (position.step - before.step) / max(position.seconds - before.seconds, 1e-9)
                values["lr"] = learning_rate(position.progress(config), config.optim)
                display.show(position.step, position.progress(config), values, rate)
                checked = scores() if due or over else {}
                if metrics is not None:
                    metrics.write(position.step, {**values, **checked}, speed=rate)
            if due and not over:
                save()
            if kept:
                keep()
        save()
    return position.progress(config) >= 1.0


def place(method: Method, config: Config, process: Process) -> Method:
    """Onto the device, in its memory layout, equal on all ranks."""
    layout = torch.channels_last if config.engine.channels_last else torch.contiguous_format
    method = method.to(process.device, memory_format=layout).train()  # type: ignore[call-overload]
    synchronise_batchnorm(method)
    broadcast_state(method)
    return method


@contextmanager
def _stop_on_signal() -> Iterator[list[int]]:
    """A list that stays empty until Ctrl-C or SIGTERM: the loop then ends after the step it is in."""
    seen: list[int] = []
    previous = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            previous[number] = signal.signal(number, lambda n, _: seen.append(n))
        except ValueError:
            break  # not the main thread: whoever runs us there handles signals
    try:
        yield seen
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
