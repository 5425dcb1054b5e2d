"""The training loop, for every method, on one device or many."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from rich.console import Console
from rich.progress import track
from torch import Tensor

from pclmix import __version__
from pclmix.config import Config
from pclmix.data.check import require_sound
from pclmix.data.dataset import Dataset
from pclmix.data.splits import validation_cut
from pclmix.data.store import Settings, Source, Store, open_store
from pclmix.distributed import broadcast_state, gather_objects
from pclmix.engine.checkpoint import load_newest, save_checkpoint
from pclmix.engine.display import Display
from pclmix.engine.feed import Feed
from pclmix.engine.finish import finish_run
from pclmix.engine.optim import WeightAverage, build_optimizer, learning_rate
from pclmix.engine.runlog import MetricLog, start_run, write_status
from pclmix.engine.step import TrainStep
from pclmix.engine.validate import scribble_scores
from pclmix.errors import PclmixError
from pclmix.methods.base import Method, build_method, build_params, find_method
from pclmix.nets.batchnorm import synchronise_batchnorm
from pclmix.nets.pretrained import load_encoder_weights
from pclmix.nets.segmenter import check_side


@dataclass
class Position:
    """How far a run has come: steps done and seconds trained."""

    step: int = 0
    seconds: float = 0.0

    def progress(self, config: Config) -> float:
        """t/T, or the share of the time budget where there is one."""
        if config.engine.seconds is not None:
            return min(1.0, self.seconds / config.engine.seconds)
        return self.step / config.engine.iterations


def train(
    dataset: Dataset,
    run: Path,
    config: Config,
    *,
    fold: int | None = None,
    resume: bool = False,
    fabric: Fabric,
    console: Console,
) -> bool:
    """Train into the folder `run`; True when it is finished, False when it was interrupted and can go on.

    `fabric` is launched already. Only the training cases of the fold are opened.
    """
    method_class = find_method(config.method)
    config = config.model_copy(update={"params": build_params(method_class, config.params).model_dump(mode="json")})
    split = validation_cut(_training_cases(dataset, fold), config.data.validation, config.seed, dataset.patient_pattern)
    content = load_newest(run) if resume else None
    if content is not None:
        _require_same(content, config, split.train, run)
    store = _open(dataset, split.train, config, method_class, fabric, console)
    _require_classes(store, dataset)
    validation = _open(dataset, split.test, config, None, fabric, console) if split.test else None

    torch.manual_seed(config.seed)
    method = build_method(config, len(dataset.channels), dataset.labels.count, len(store))
    if content is None:
        load_encoder_weights(method.net.encoder, config.encoder.weights, len(dataset.channels))
    method = _place(method, config, fabric)
    optimizer = build_optimizer(method.parameters(), config.optim, fabric.device)
    average = WeightAverage(method, config.engine.ema) if config.engine.ema > 0 else None
    torch.manual_seed(config.seed + 1_000_003 * fabric.global_rank)
    generator = torch.Generator(fabric.device).manual_seed(config.seed + 7 + 1_000_003 * fabric.global_rank)
    feed = Feed(store, config.engine.batch, config.seed, fabric.device, fabric.global_rank, fabric.world_size)
    graph = config.engine.graph and fabric.device.type == "cuda" and fabric.world_size == 1
    step = TrainStep(method, optimizer, average, feed, store.maps, config, generator, graph)
    position = Position()
    if content is not None:
        position = _restore(content, method, optimizer, average, generator, fabric)

    about = _about(dataset, config, split.train, fold, store)

    def save() -> None:
        step.require_finite()
        random = gather_objects(_random_state(generator, fabric.device))
        if fabric.is_global_zero:
            state: dict[str, Any] = {
                "method": method.state_dict(),
                "optimizer": optimizer.state_dict(),
                "random": random,
            }
            state["average"] = average.state_dict() if average is not None else None
            save_checkpoint(run, {**about, **state, "step": position.step, "seconds": position.seconds})

    def scores() -> dict[str, float]:
        return {} if validation is None else scribble_scores(method, validation, fabric.device)

    if fabric.is_global_zero:
        start_run(run, config, str(fabric.device))
        write_status(run, status="running", step=position.step, dataset=str(dataset.root.resolve()), fold=fold)
    finished = _iterate(step, config, position, run, save, scores, fabric, console)
    if fabric.is_global_zero:
        status = "finished" if finished else "interrupted"
        write_status(run, status=status, step=position.step, seconds=round(position.seconds, 3))
        if finished:
            finish_run(run, dataset.labels, store, fabric.device)
    return finished


def _iterate(
    step: TrainStep,
    config: Config,
    position: Position,
    run: Path,
    save: Callable[[], None],
    scores: Callable[[], dict[str, float]],
    fabric: Fabric,
    console: Console,
) -> bool:
    """Steps until the budget is spent or somebody asks to stop; True when it was spent."""
    engine = config.engine
    metrics = MetricLog(run, position.step) if fabric.is_global_zero else None
    started = time.perf_counter() - position.seconds
    before = Position(position.step, position.seconds)
    with _stop_on_signal() as stopped, Display(config.method, console, quiet=not fabric.is_global_zero) as display:
        while position.progress(config) < 1.0 and not stopped:
            step(position.step, position.progress(config))
            position.step += 1
            position.seconds = time.perf_counter() - started
            over = position.progress(config) >= 1.0
            due = position.step % engine.save_every == 0
            if position.step % engine.log_every == 0 or due or over:
                values = step.read()  # waits for the device, so the clock below is honest
                step.require_finite()
                position.seconds = time.perf_counter() - started
                rate = (position.step - before.step) / max(position.seconds - before.seconds, 1e-9)
                values["lr"] = learning_rate(position.progress(config), config.optim)
                display.show(position.step, position.progress(config), values, rate)
                checked = scores() if due or over else {}
                if metrics is not None:
                    metrics.write(position.step, {**values, **checked}, speed=rate)
            if due and not over:
                save()
        save()
    if metrics is not None:
        metrics.close()
    return not stopped or position.progress(config) >= 1.0


def _training_cases(dataset: Dataset, fold: int | None) -> tuple[str, ...]:
    cases = dataset.cases if fold is None else dataset.fold(fold).train
    if not cases:
        raise PclmixError(f"{dataset.root}: there is no case to train on" + (f" in fold {fold}" if fold else ""))
    return cases


def _open(
    dataset: Dataset,
    cases: Sequence[str],
    config: Config,
    method: type[Method] | None,
    fabric: Fabric,
    console: Console,
) -> Store:
    """Check these cases and map their store; rank 0 of each node does the work, the others wait and then read."""
    source: Source = "reference" if method is not None and method.needs == "dense masks" else "scribble"
    maps = config.method if method is not None and method.has_maps() else ""
    settings = Settings(config.data.size, config.data.intensity, source, maps)
    precompute = method.precompute if method is not None and maps else None
    with fabric.rank_zero_first(local=True):
        if fabric.local_rank == 0:
            require_sound(dataset, cases)
        quiet = not console.is_terminal or fabric.local_rank != 0
        return open_store(dataset, cases, settings, precompute=precompute, progress=bar("preparing", console, quiet))


def bar(title: str, console: Console, quiet: bool) -> Callable[[Iterable[Any], int], Iterable[Any]]:
    """A progress bar around an iterable of known length."""
    return lambda items, total: track(items, title, total, console=console, disable=quiet, transient=True)


def _require_classes(store: Store, dataset: Dataset) -> None:
    seen = np.unique(store.labels[:, 0])
    missing = [name for k, name in enumerate(dataset.labels.names) if k not in seen]
    if missing:
        raise PclmixError(
            f"{dataset.root}: no scribble of class {', '.join(missing)} in any training case; "
            "draw some, or remove the class from dataset.json"
        )


def _place(method: Method, config: Config, fabric: Fabric) -> Method:
    """Onto the device, in its memory layout, equal on all ranks."""
    check_side(*config.data.size, method.net.multiple)
    world, batch = fabric.world_size, config.engine.batch
    if batch % world:
        raise PclmixError(f"engine.batch={batch} cannot be split over {world} devices; choose a multiple of {world}")
    if batch // world < 2:
        raise PclmixError(
            f"engine.batch={batch} on {world} device(s) leaves {batch // world} image a step and device: "
            f"BatchNorm needs two; set engine.batch={2 * world} or more"
        )
    layout = torch.channels_last if config.engine.channels_last else torch.contiguous_format
    method = method.to(fabric.device, memory_format=layout).train()  # type: ignore[call-overload]
    if world > 1:
        synchronise_batchnorm(method)
        broadcast_state(method)
    return method


def _about(dataset: Dataset, config: Config, cases: Sequence[str], fold: int | None, store: Store) -> dict[str, Any]:
    """What a checkpoint says of itself besides weights: enough to predict with it and to repeat it."""
    spacings = np.array(store.spacings)
    return {
        "version": __version__,
        "config": config.model_dump(mode="json"),
        "labels": {"names": list(dataset.labels.names), "ignore": dataset.labels.ignore},
        "channels": list(dataset.channels),
        "spacing": {
            n: [float(v) for v in f(spacings, axis=0)]
            for n, f in (("median", np.median), ("min", np.min), ("max", np.max))
        },
        "run": {"dataset": dataset.name, "fold": fold, "cases": list(cases)},
    }


def _require_same(content: dict[str, Any], config: Config, cases: Sequence[str], run: Path) -> None:
    """A resume must go on with what was begun."""
    then, now = flatten(content["config"]), flatten(config.model_dump(mode="json"))
    changed = [key for key in now if now[key] != then.get(key)]
    if changed:
        shown = ", ".join(f"{key}: {then.get(key)} then, {now[key]} now" for key in changed[:3])
        raise PclmixError(f"{run} was trained with other settings ({shown}); repeat them or choose another --out")
    if list(cases) != content["run"]["cases"]:
        raise PclmixError(f"{run} was trained on other cases; give the same dataset and --fold, or another --out")


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def _random_state(generator: torch.Generator, device: torch.device) -> dict[str, Tensor]:
    state = {"own": generator.get_state(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore(
    content: dict[str, Any],
    method: Method,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None,
    generator: torch.Generator,
    fabric: Fabric,
) -> Position:
    """Put everything a checkpoint holds back where it was."""
    if len(content["random"]) != fabric.world_size:
        count = len(content["random"])
        raise PclmixError(f"this run was trained on {count} device(s); resume it with --devices {count}")
    method.load_state_dict(content["method"])
    optimizer.load_state_dict(content["optimizer"])
    if average is not None:
        average.load_state_dict(content["average"])
    state = content["random"][fabric.global_rank]
    generator.set_state(state["own"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], fabric.device)
    return Position(content["step"], content["seconds"])


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
