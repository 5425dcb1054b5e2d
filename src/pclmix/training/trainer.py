"""The training loop, for every method, on one device or many."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from pclmix import __version__
from pclmix.config import planned_steps
from pclmix.data.batch import mixed_supervision
from pclmix.data.habits import Habits, classes_with, override_habits
from pclmix.data.store import Store
from pclmix.errors import PclmixError
from pclmix.io.files import sweep
from pclmix.methods.base import Method, build_method
from pclmix.nets.segmenter import Segmenter
from pclmix.nets.weights import load_encoder_weights
from pclmix.training import rounds
from pclmix.training.checkpoint import (
    LAST,
    SNAPSHOTS,
    Checkpoint,
    Round,
    Spacings,
    TrainedOn,
    build_net,
    save_checkpoint,
    save_snapshot,
)
from pclmix.training.feed import Feed
from pclmix.training.finetune import load_start
from pclmix.training.log import CONFIG, ENVIRONMENT, METRICS, RUN, Display, MetricLog, duration, start_run, write_status
from pclmix.training.optim import WeightAverage, learning_rate, load_optimizer, make_optimizer
from pclmix.training.parallel import Process, from_rank_0, gather_objects, largest, synchronise_batchnorm
from pclmix.training.plan import Plan
from pclmix.training.prepare import Prepared
from pclmix.training.probe import use_plain_kernels_if_fused_disagree
from pclmix.training.scores import CASES, EXAMPLES, scribble_scores, slices_within, write_results
from pclmix.training.step import Gradients, TrainStep

_SCORING = 0.1  # largest share of the minutes left after preparing for predicting training cases
_SHORT = 0.25  # share of the minutes for training below which a note is printed
_TO_SAVE = 4.0  # seconds reserved for the checkpoint and the figures of a run,
_SLOW = 0.25  # plus this share of the start-up time
_TIMED, _LONG = 2, 600.0  # steps timed on a CPU, and seconds above which the duration is printed


class Trainer:
    """One method, its optimiser and its data on a device. `run` trains into the run folder."""

    def __init__(self, plan: Plan, data: Prepared, process: Process, console: Console) -> None:
        """Build everything that a step needs, from the plan's checkpoint if there is one. Writes nothing."""
        self.plan, self.data, self.process, self.console, self.config = plan, data, process, console, plan.config
        checkpoint = plan.checkpoint
        self.steps, self.seconds = (checkpoint.step, checkpoint.seconds) if checkpoint else (0, 0.0)
        self.round = checkpoint.round if checkpoint else Round()
        self.scored: int | None = None  # slices predicted at the end; None for all, or as many as on a CPU
        labels = None
        if self.round.number > 1:
            labels = self._shared(lambda: rounds.read_labels(plan.out, self.round, data.train))
        self._begin(labels, checkpoint)

    def _begin(self, labels: rounds.Labelling | None, checkpoint: Checkpoint | None = None) -> None:
        """Build networks, optimiser and step of this round; further rounds train on `labels`."""
        device, process, data = self.process.device, self.process, self.data
        config = self.settings = self.config.of_round(self.round.number)
        store = data.train if labels is None else rounds.with_labels(data.train, labels)
        torch.manual_seed(config.seed)  # the same networks on every rank
        self.method = self._build(checkpoint)
        torch.manual_seed(config.seed + 1_000_003 * process.rank)  # dropout differs between ranks
        self.generator = torch.Generator(device).manual_seed(config.seed + 7 + 1_000_003 * process.rank)
        feed = Feed(store, config.engine.batch, config.seed, device, process.rank, process.world, config.data.patch)
        ring = classes_with("ring", self._habits(), self.plan.dataset.labels)
        mixed = mixed_supervision(store, device)
        gradients = Gradients(self.method, feed, config, self.generator, ring[0] if ring else None, mixed)
        if device.type == "cuda" and config.engine.precision == "bf16":
            use_plain_kernels_if_fused_disagree(gradients, self.steps - self.round.begins, self.progress)
        if process.distributed:
            gradients.average_over_ranks()
        self.optimizer = make_optimizer(self.method.parameters(), config.optim, device)
        self.average = WeightAverage(self.method, config.engine.ema) if config.engine.ema > 0 else None
        if checkpoint is not None:
            self._restore(checkpoint)
        graph = config.engine.graph and device.type == "cuda"
        self.step = TrainStep(gradients, self.optimizer, self.average, graph)

    @property
    def progress(self) -> float:
        """t/T of this round, or the elapsed share of its time budget."""
        if self.config.engine.seconds is None:
            return (self.steps - self.round.begins) / self.settings.engine.iterations
        since = self.round.since
        return min(1.0, max(0.0, (self.seconds - since) / (rounds.end_of(self.config, self.round) - since)))

    def run(self) -> bool:
        """Train until the budget is spent (True) or a signal asks to stop (False); both end with a checkpoint."""
        self._fit_minutes()
        with closing(self), self._reporting(), stop_on_signal() as signals:
            started = time.perf_counter() - self.seconds
            stop = self._loop(started, signals)
            self.save()
            while self.round.number < self.config.rounds.count and not stop:
                self._next_round(started)
                stop = self._loop(started, signals)
                self.save()
            finished = self.progress >= 1.0 and self.round.number == self.config.rounds.count
            if self.process.first and finished:
                write_results(self.plan.out, self.plan.dataset, self.data.train, self.process.device, self.scored)
        if self.process.first:
            status = "finished" if finished else "interrupted"
            write_status(self.plan.out, status=status, step=self.steps, seconds=round(self.seconds, 3))
        return finished

    def close(self) -> None:
        """Free the device memory of a round."""
        self.step.close()
        gc.collect()
        if self.process.device.type == "cuda":
            torch.cuda.empty_cache()

    def _fit_minutes(self) -> None:
        """Set the time budget: the remaining minutes less the time to finish."""
        if self.plan.minutes is None:
            return
        total, started = 60 * self.plan.minutes, self.plan.request.started
        scoring = _SCORING * max(0.0, total - (time.time() - started))
        patch, store = self.config.data.patch, self.data.train
        self.scored, ending = slices_within(scoring, self.method, store, self.process.device, patch)
        spent = time.time() - started
        left = total - spent - ending - _TO_SAVE - _SLOW * spent
        (seconds,) = largest([max(1.0, left)])
        if left < _SHORT * total and self.process.first:
            text = f"preparing took {spent:.0f} s: only {seconds:.0f} s of {total:.0f} s are left for training. "
            self.console.print(text + "Give more --minutes for a useful network", highlight=False, soft_wrap=True)
        engine = self.config.engine.model_copy(update={"seconds": round(seconds, 1)})
        self.config = self.config.model_copy(update={"engine": engine})

    def _next_round(self, started: float) -> None:
        """Predict and correct labels of the training slices, and build a fresh network to train on them."""
        plan, device, number = self.plan, self.process.device, self.round.number + 1
        net = build_net(self.checkpoint()) if self.process.first else None  # before its weights are released
        del self.optimizer, self.average, self.method
        self.close()

        def make() -> rounds.Labelling:
            assert net is not None
            bf16 = device.type == "cuda" and self.config.engine.precision == "bf16"
            made = rounds.make_labels(
                net, self.data.train, self._habits(), plan.dataset.labels, device, bf16, self.config.rounds
            )
            rounds.write_labels(plan.out, number, made)
            return made

        labels = self._shared(make)
        self._agree(started, [])
        since = 0.0 if self.config.engine.seconds is None else self.seconds
        self.round = Round(number=number, begins=self.steps, since=since, labels=rounds.digest(labels))
        self._begin(labels)

    def _shared(self, make: Callable[[], rounds.Labelling]) -> rounds.Labelling:
        """Labels of rank 0, read or made there, on every rank."""
        images = self.data.train.images
        labels = make() if self.process.first else np.zeros((len(images), *images.shape[2:]), np.uint8)
        return from_rank_0(torch.from_numpy(labels)).numpy()

    def _habits(self) -> Habits:
        return override_habits({}, self.config.habits, self.plan.dataset.labels)

    def _loop(self, started: float, signals: list[int]) -> bool:
        """Train this round; the clock started at `started`. Returns whether a signal asks to stop."""
        engine, first, number = self.config.engine, self.process.first, self.round.number
        stop = self._agree(started, signals)
        logged = since = self.steps, self.seconds
        metrics = closing(MetricLog(self.plan.out, self.steps)) if first else nullcontext()
        of = f", round {number}/{self.config.rounds.count}" if self.config.rounds.count > 1 else ""
        with Display(f"{self.config.method}{of}", self.console, quiet=not first) as display, metrics as log:
            while self.progress < 1.0 and not stop:
                self.step(self.steps - self.round.begins, self.progress)
                self.steps += 1
                stop = self._agree(started, signals)
                if self.steps == since[0] + _TIMED and engine.seconds is None and self.process.device.type == "cpu":
                    self._say_time((self.seconds - since[1]) / _TIMED)
                over = self.progress >= 1.0
                save = self.steps % engine.save_every == 0
                keep = engine.keep_every > 0 and self.steps % engine.keep_every == 0
                if self.steps % engine.log_every == 0 or save or keep or over:
                    values = self.step.read()  # waits for the device, so that the clock includes its work
                    self.step.require_finite()
                    stop = self._agree(started, signals)
                    rate = (self.steps - logged[0]) / max(self.seconds - logged[1], 1e-9)
                    values["lr"] = learning_rate(self.progress, self.settings.optim)
                    display.show(self.steps, self.progress, values, rate)
                    checked = self._validate() if save or over else {}
                    if log is not None:
                        log.write(self.steps, {**values, **checked}, round=number, speed=rate)
                if save and not over:
                    self.save()
                if keep:
                    self.step.require_finite_weights(self.steps)
                    if first:
                        save_snapshot(self.plan.out, self.checkpoint(), self.method.inference_nets)
        return stop

    def _say_time(self, step: float) -> None:
        """Print how long a training by steps takes, if long; the first metrics may be many steps away."""
        left = step * (planned_steps(self.config.model_dump()) - self.steps)
        if left > _LONG and self.process.first:
            text = f"about {duration(left)} at {step:.1f} s per step. To limit it, give --minutes; without --recipe, "
            text += "settings are planned for this device"
            self.console.print(text, highlight=False, soft_wrap=True)

    def _agree(self, started: float, signals: list[int]) -> bool:
        """Common clock and stop decision of all ranks, so that they end at the same step."""
        self.seconds, stop = largest([time.perf_counter() - started, float(len(signals))])
        return stop > 0

    def _validate(self) -> dict[str, float]:
        held_out = self.data.validation
        if held_out is None:
            return {}
        return scribble_scores(self.method, held_out, self.process.device, self.config.data.patch)

    def save(self) -> None:
        """Write RUN/last.ckpt."""
        self.step.require_finite()
        self.step.require_finite_weights(self.steps)
        random = gather_objects(self._random_state())
        if self.process.first:
            state = self.optimizer.state_dict()
            save_checkpoint(self.plan.out, self.checkpoint(optimizer=state, random=tuple(random)))

    def checkpoint(self, **state: Any) -> Checkpoint:
        """The current weights, and `state` needed to resume."""
        plan = self.plan
        return Checkpoint(
            version=__version__,
            config=self.config,
            labels=plan.dataset.labels,
            channels=plan.dataset.channels,
            spacing=_spacings(self.data.train),
            run=TrainedOn(dataset=plan.dataset.name, fold=plan.fold, cases=self.data.train.cases),
            step=self.steps,
            seconds=self.seconds,
            round=self.round,
            method=self.method.state_dict(),
            average=None if self.average is None else self.average.state_dict(),
            **state,
        )

    def _build(self, checkpoint: Checkpoint | None) -> Method:
        """The networks on the device in their memory layout, with initial weights."""
        config, dataset = self.settings, self.plan.dataset
        method = build_method(config, len(dataset.channels), dataset.labels.count, len(self.data.train))
        if checkpoint is not None:
            method.load_state_dict(checkpoint.method)
        elif self.plan.start is not None and self.round.number == 1:
            load_start(method, config, self.plan.start, dataset.labels)
        else:
            for name in method.inference_nets:
                net = method.get_submodule(name)
                assert isinstance(net, Segmenter)
                load_encoder_weights(net.encoder, config.encoder.weights, len(dataset.channels))
        method.to(self.process.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        synchronise_batchnorm(method)
        return method

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Restore optimiser, weight average and random generators from a checkpoint; `_build` restores the weights."""
        if checkpoint.optimizer is None or checkpoint.random is None:
            raise PclmixError(f"{self.plan.out / LAST} is a snapshot, which cannot be resumed")
        load_optimizer(self.optimizer, checkpoint.optimizer)
        if self.average is not None and checkpoint.average is not None:
            self.average.load_state_dict(checkpoint.average)
        state = checkpoint.random[self.process.rank]
        self.generator.set_state(state["own"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.process.device)

    def _random_state(self) -> dict[str, Tensor]:
        state = {"own": self.generator.get_state(), "torch": torch.get_rng_state()}
        if self.process.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.process.device)
        return state

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Write the run's description, and its status if it fails."""
        out, dataset = self.plan.out, self.plan.dataset
        if not self.process.first:
            yield
            return
        for name in (LAST, CONFIG, ENVIRONMENT, RUN, METRICS, CASES, EXAMPLES, rounds.LABELS.format("*")):
            sweep(out / name)
        sweep(out / SNAPSHOTS / "step-*.ckpt")
        start_run(out, self.config, str(self.process.device))
        write_status(out, status="running", step=self.steps, dataset=str(dataset.root.resolve()), fold=self.plan.fold)
        if self.plan.start is not None:
            write_status(out, start_from=str(self.plan.start.run.resolve()))
        try:
            yield
        except PclmixError as error:
            with suppress(PclmixError):  # a full disk is already reported
                write_status(out, status="failed", step=self.steps, reason=str(error))
            raise


def _spacings(store: Store) -> Spacings:
    spacings = np.array(store.spacings)
    return Spacings(median=np.median(spacings, 0).tolist(), min=spacings.min(0).tolist(), max=spacings.max(0).tolist())


@contextmanager
def stop_on_signal() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C or SIGTERM; the loop then ends after its current step."""
    seen: list[int] = []
    previous = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            previous[number] = signal.signal(number, lambda n, _: seen.append(n))
        except ValueError:
            break  # not the main thread, which handles signals itself
    try:
        yield seen
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
