"""One step: it never waits for the device, works on the same memory every time, and a graph changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pclmix.config import Config, load_config
from pclmix.data.batch import outside_hull
from pclmix.data.dataset import Dataset
from pclmix.data.store import Settings, Store, open_store
from pclmix.errors import PclmixError
from pclmix.methods.base import build_method
from pclmix.training.checkpoint import LAST, load_checkpoint
from pclmix.training.feed import Feed
from pclmix.training.optim import WeightAverage, make_optimizer
from pclmix.training.step import Gradients, TrainStep

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store(phantom: Path) -> Store:
    dataset = Dataset.open(phantom)
    return open_store(dataset, dataset.cases, Settings((64, 64)))


def make_step(store: Store, method: str, *overrides: str) -> TrainStep:
    config: Config = load_config("tiny", method, overrides)
    torch.manual_seed(0)
    built = build_method(config, 1, 4, len(store)).train()
    optimizer = make_optimizer(built.parameters(), config.optim, CPU)
    average = WeightAverage(built, config.engine.ema)
    feed = Feed(store, config.engine.batch, config.seed, CPU)
    generator = torch.Generator().manual_seed(0)
    return TrainStep(Gradients(built, feed, config, generator, ring=0), optimizer, average)


@pytest.mark.parametrize("precision", ["32", "bf16"])
@pytest.mark.parametrize("method", ["pclmix", "pce"])
def test_the_whole_step_never_waits(
    store: Store, method: str, precision: str, no_sync: Callable[[], AbstractContextManager[Any]]
) -> None:
    strong = (
        "augment.scale=0.2",
        "augment.shift=0.1",
        "augment.pinch=0.5",
        "data.ring_share=0.02",
        "augment.gamma=0.3",
        "augment.contrast=0.2",
        "augment.noise=0.1",
    )
    step = make_step(store, method, *strong, "optim.clip=1", f"engine.precision={precision}")
    step(0, 0.0)  # creates lazy state, as before a capture
    step.feed.fill(1)
    with no_sync():
        step._body()
    assert all(torch.isfinite(torch.tensor(list(step.read().values()))))


def addresses(step: TrainStep) -> dict[str, int]:
    """Memory addresses of all state that is kept between steps."""
    lasting: dict[str, Tensor] = {f"method.{k}": v for k, v in step.method.state_dict(keep_vars=True).items()}
    for number, state in enumerate(step.optimizer.state.values()):
        lasting |= {f"optimizer.{number}.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
    assert step.average is not None
    lasting |= {f"average.{number}": tensor for number, tensor in enumerate(step.average._sum)}
    lasting |= {name: getattr(step.feed, name) for name in ("image", "label", "index")}
    lasting |= {name: getattr(step, name) for name in ("number", "bad_step", "bad_terms")}
    lasting["progress"] = step.gradients.progress
    return {name: tensor.data_ptr() for name, tensor in lasting.items()}


@pytest.mark.parametrize("method", ["pclmix", "pce"])
def test_a_step_works_on_the_same_memory(store: Store, method: str) -> None:
    """What a captured graph relies on: state is changed in place, inputs are read from fixed buffers."""
    step = make_step(store, method)
    step(0, 0.0)
    before = addresses(step)
    weights = next(step.method.parameters()).detach().clone()
    for number in (1, 2):
        step(number, number / 10)
    assert addresses(step) == before
    assert not torch.equal(next(step.method.parameters()), weights)
    assert int(step.number) == 3


def test_a_step_is_a_function_of_its_buffers(store: Store) -> None:
    """Replaying the body alone, without `__call__`, does the same as calling it."""
    called, replayed = make_step(store, "pce"), make_step(store, "pce")
    for number in range(3):
        called(number, 0.0)
        replayed.feed.fill(number)
        replayed._body()
    for one, two in zip(called.method.parameters(), replayed.method.parameters(), strict=True):
        assert torch.equal(one, two)


def test_graph_changes_nothing_on_a_cpu(phantom: Path, tmp_path: Path, train: Callable[..., Any]) -> None:
    for graph in ("true", "false"):
        assert train(phantom, tmp_path / graph, "engine.iterations=3", f"engine.graph={graph}", method="pce")[0]
    one, two = (load_checkpoint(tmp_path / graph / LAST).method for graph in ("true", "false"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    logs = [(tmp_path / graph / "metrics.jsonl").read_bytes() for graph in ("true", "false")]
    assert logs[0] == logs[1]


def test_the_first_bad_step_is_remembered(store: Store) -> None:
    step = make_step(store, "pce")
    for number, value in ((1, 1.0), (2, torch.nan), (3, torch.inf)):
        step.number.fill_(number)
        values = {"loss": torch.tensor(value), "loss/a": torch.tensor(1.0), "loss/b": torch.tensor(value)}
        step._note(values)
    with pytest.raises(Exception, match=r"step 2\b.*\bb\b"):
        step.require_finite()


def labels_seen(store: Store, *overrides: str) -> Tensor:
    """The first batch as the method gets it, without augmentation."""
    step = make_step(store, "pce", *overrides, "augment.quarter_turns=0", "augment.rotate=0")
    step.feed.fill(0)
    seen: list[Tensor] = []
    taken = step.method.step
    step.method.step = lambda batch, *rest: (seen.append(batch.label.clone()), taken(batch, *rest))[1]  # type: ignore[method-assign]
    step.gradients()
    return seen[0]


def test_pixels_outside_the_ring_are_background_to_the_method(store: Store) -> None:
    """The same strokes as without the setting, and some more background pixels, none of them within the hull."""
    plain, more = labels_seen(store), labels_seen(store, "data.ring_share=0.1")
    outside = outside_hull(plain)
    assert outside.any()
    assert torch.equal(plain[~outside], more[~outside])
    assert set(more[outside].unique().tolist()) == {-1, 0}
    assert 0.05 < (more[outside] == 0).float().mean() < 0.15


def test_methods_with_slice_state_refuse_pinch() -> None:
    with pytest.raises(PclmixError, match=r"augment\.pinch=0\.5.*s2l"):
        build_method(load_config("tiny", "s2l", ["augment.pinch=0.5"]), 1, 4, 10)
