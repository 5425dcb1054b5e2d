"""A small phantom, runs of a few steps on it, and processes to run them in."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pclmix.config import Config
from pclmix.labels import Labels
from pclmix.methods.base import METHODS, load_all
from pclmix.synth.phantom import make_phantom
from pclmix.training.checkpoint import LAST, Checkpoint, Spacings, TrainedOn, load_checkpoint
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training

HERE = Path(__file__).parent
#: Twelve steps, a checkpoint after every third.
SHORT = ("engine.iterations=12", "engine.save_every=3")


@pytest.fixture(scope="session", autouse=True)
def _one_thread_and_an_own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Results are bit-identical for a fixed number of threads; the cache is not in the home folder."""
    threads, before = torch.get_num_threads(), dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PCLMIX_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))  # forked processes import engine_worker by name
    multiprocessing.get_context("forkserver").set_forkserver_preload(["pclmix.training.start"])
    yield
    sys.path.remove(str(HERE))
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def odd_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """The diverging methods of engine_worker, registered for one test only."""
    import engine_worker

    load_all()
    monkeypatch.setattr(METHODS, "_items", {**METHODS._items, **engine_worker.OWN})


@pytest.fixture(scope="session")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three patients, two frames each, three folds. Tests that change files copy it first."""
    root = tmp_path_factory.mktemp("data") / "phantom"
    make_phantom(root, 3)
    return root


@pytest.fixture(scope="session")
def train() -> Callable[..., tuple[bool, str]]:
    """`pclmix train --recipe tiny --device cpu` in this process: whether it finished, and its output."""

    def call(dataset: Path, out: Path, *overrides: str, **options: Any) -> tuple[bool, str]:
        said = io.StringIO()
        request = TrainRequest(dataset, out, overrides=overrides, **{"recipe": "tiny", "device": "cpu", **options})
        return run_training(request, Console(file=said, width=300)), said.getvalue()

    return call


@pytest.fixture(scope="session")
def unbroken(phantom: Path, train: Callable[..., tuple[bool, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of PCLMix."""
    run = tmp_path_factory.mktemp("runs") / "unbroken"
    assert train(phantom, run, *SHORT)[0]
    return run


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., tuple[ForkServerProcess, Path]]]:
    """Training in a separate process, and the file for its result."""
    processes: list[ForkServerProcess] = []

    def start(dataset: Path, out: Path, *overrides: str, **options: Any) -> tuple[ForkServerProcess, Path]:
        import engine_worker

        answer = tmp_path / f"answer{len(processes)}.json"
        environment = {k: os.environ[k] for k in ("PCLMIX_CACHE", "OMP_NUM_THREADS")}
        environment |= options.pop("environment", {})
        options = {"recipe": "tiny", "device": "cpu", "overrides": overrides, **options}
        process = multiprocessing.get_context("forkserver").Process(
            target=engine_worker.train, args=(environment, str(answer), dataset, out), kwargs=options
        )
        process.start()
        processes.append(process)
        return process, answer

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.fixture(scope="session")
def make_checkpoint() -> Callable[..., Checkpoint]:
    """A small checkpoint of a given step: one weight of `size` numbers."""

    def make(step: int, size: int = 1000) -> Checkpoint:
        return Checkpoint(
            version="0",
            config=Config(),
            labels=Labels(("background", "a"), 2),
            channels=("MRI",),
            spacing=Spacings(median=(1, 1, 1), min=(1, 1, 1), max=(1, 1, 1)),
            run=TrainedOn(dataset="d", fold=None, cases=("c",)),
            step=step,
            seconds=0.0,
            method={"w": torch.full((size,), float(step))},
        )

    return make


def same(one: Any, other: Any, where: str = "checkpoint") -> None:
    """Nested content equal to the last bit."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{where}.{number}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    else:
        assert one == other, where


@pytest.fixture(scope="session")
def same_run() -> Callable[[Path, Path], None]:
    """Two runs are bit-identical: weights, buffers, average, optimiser, random states, metrics."""

    def compare(one: Path, other: Path) -> None:
        first, second = (load_checkpoint(run / LAST).to_plain() for run in (one, other))
        for content in (first, second):
            content.pop("seconds")  # elapsed time differs between runs
        same(first, second)
        assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
        assert not list(other.glob(".*"))

    return compare
