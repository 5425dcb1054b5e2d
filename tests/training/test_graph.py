"""The captured step, with CUDA mocked: what is captured, on which stream, and that nothing keeps the graph alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator

from pclmix.config import load_config
from pclmix.data.dataset import Dataset
from pclmix.data.store import Settings, Store, open_store
from pclmix.methods.base import build_method
from pclmix.training.feed import Feed
from pclmix.training.optim import WeightAverage, make_optimizer
from pclmix.training.start import ran_out_of_memory
from pclmix.training.step import Gradients, TrainStep

CPU = torch.device("cpu")


class Stream:
    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class Cuda:
    """Streams and graphs on a CPU: a capture runs the body, so that the replay right after it does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.captures, self.replays = Stream(), list[dict[str, Any]](), 0
        self.registered: list[Generator] = []
        cuda = self

        class Graph:
            body: Callable[[], None] | None = None

            def __init__(self) -> None:
                self.fresh = True

            def register_generator_state(self, generator: Generator) -> None:
                cuda.registered.append(generator)

            def replay(self) -> None:
                cuda.replays += 1
                if not self.fresh:
                    assert self.body is not None
                    self.body()
                self.fresh = False

            def reset(self) -> None:
                self.body = None

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def capture(self, graph: Any, **options: Any) -> Iterator[None]:
        self.captures.append(options)
        with self.on(options["stream"]):
            yield


@pytest.fixture(scope="module")
def store(phantom: Path) -> Store:
    dataset = Dataset.open(phantom)
    return open_store(dataset, dataset.cases, Settings((64, 64)))


def make_step(store: Store, *, graph: bool, distributed: bool = False) -> TrainStep:
    config = load_config("tiny", "pce", ["engine.ema=0.9"])
    torch.manual_seed(0)
    method = build_method(config, 1, 4, len(store)).train()
    feed = Feed(store, config.engine.batch, config.seed, CPU)
    gradients = Gradients(method, feed, config, Generator().manual_seed(3))
    gradients.stream, gradients.distributed = Stream() if graph else None, distributed  # type: ignore[assignment]
    optimizer = make_optimizer(method.parameters(), config.optim, CPU)
    step = TrainStep(gradients, optimizer, WeightAverage(method, 0.9), graph)
    if graph:
        step._run.graph.body = step._body  # type: ignore[attr-defined]
    return step


@pytest.mark.parametrize(("distributed", "warm_up", "mode"), [(False, 3, "global"), (True, 11, "thread_local")])
def test_warm_up_and_capture_share_a_stream(
    store: Store, monkeypatch: pytest.MonkeyPatch, distributed: bool, warm_up: int, mode: str
) -> None:
    cuda = Cuda(monkeypatch)
    main = cuda.current
    eager, graphed = make_step(store, graph=False), make_step(store, graph=True, distributed=distributed)
    for number in range(warm_up + 3):
        graphed(number, 0.1)
        eager(number, 0.1)
        assert cuda.replays == max(0, number + 1 - warm_up)
        assert cuda.current is main
    own = graphed.gradients.stream
    assert cuda.captures == [{"stream": own, "capture_error_mode": mode}]
    assert cuda.registered == [graphed.gradients.generator]
    assert own.waited_for == [main] * warm_up  # type: ignore[union-attr]
    assert main.waited_for == [own] * warm_up
    for one, other in zip(eager.method.parameters(), graphed.method.parameters(), strict=True):
        assert torch.equal(one, other)
    assert eager.read() == graphed.read()


def test_a_closed_step_holds_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without garbage collection: NCCL cannot shut down while a graph with its collectives is alive."""
    Cuda(monkeypatch)
    step = make_step(store, graph=True)
    for number in range(4):
        step(number, 0.1)
    held = [weakref.ref(step._run.graph), weakref.ref(step.method), weakref.ref(step.gradients)]  # type: ignore[attr-defined]
    gc.collect()
    gc.disable()
    try:
        step.close()
        assert [kept() for kept in held] == [None, None, None]
    finally:
        gc.enable()
    step.close()


def test_out_of_memory_during_capture_is_recognised() -> None:
    error = RuntimeError("operation failed due to a previous error during capture")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert ran_out_of_memory(error)
    assert ran_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not ran_out_of_memory(RuntimeError("expected a tensor"))
