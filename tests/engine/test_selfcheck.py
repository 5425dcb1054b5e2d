"""The check of the fused kernels before training: it finds what differs and leaves no trace."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor

from pclmix.config import load_config
from pclmix.data.batch import Batch
from pclmix.data.dataset import Dataset
from pclmix.data.store import Settings, open_store
from pclmix.engine import selfcheck
from pclmix.engine.feed import Feed
from pclmix.engine.optim import Optimizer
from pclmix.engine.selfcheck import compare_kernels, use_plain_kernels_if_fused_disagree
from pclmix.engine.step import TrainStep
from pclmix.methods.base import Term, Terms, build_method
from pclmix.nets import fused


@pytest.fixture
def step(phantom: Path) -> TrainStep:
    dataset = Dataset.open(phantom)
    store = open_store(dataset, dataset.cases, Settings((64, 64)))
    config = load_config("tiny", "pclmix")
    torch.manual_seed(0)
    method = build_method(config, 1, 4, len(store)).train()
    feed = Feed(store, config.engine.batch, config.seed, torch.device("cpu"))
    optimizer = Optimizer(method.parameters(), config.optim, feed.device)
    return TrainStep(method, optimizer, None, feed, (), config, Generator().manual_seed(3), False)


def break_fused(step: TrainStep, monkeypatch: pytest.MonkeyPatch, value: float, slope: float) -> None:
    """As if the fused kernels changed a loss by a factor, or the gradient of the first weights."""
    right = type(step.method).step

    def wrong(self: object, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        terms = right(self, batch, progress, generator)  # type: ignore[arg-type]
        if not fused._switched_off:
            sup = terms["sup"].value * value
            weight = step.method.net.encoder.conv1.weight  # type: ignore[union-attr]
            terms["sup"] = Term(sup + slope * (weight - weight.detach()).sum())  # type: ignore[operator]
        return terms

    monkeypatch.setattr(type(step.method), "step", wrong)


def test_agreement_leaves_no_trace(step: TrainStep) -> None:
    before = {name: tensor.clone() for name, tensor in step.method.state_dict().items()}
    drawn, common = step.generator.get_state(), torch.get_rng_state()
    assert compare_kernels(step, 0, 0.5) == ""
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.method.state_dict().items())
    assert torch.equal(step.generator.get_state(), drawn)
    assert torch.equal(torch.get_rng_state(), common)
    assert all(parameter.grad is None for parameter in step.parameters)


def test_kernels_are_rehearsed_first_and_without_a_trace(step: TrainStep, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    @contextmanager
    def rehearsal() -> Iterator[None]:
        happened.append("begins")
        yield
        happened.append("ends")

    right = type(step).backward

    def backward(self: TrainStep) -> tuple[tuple[str, ...], list[Tensor]]:
        happened.append("pass")
        return right(self)

    monkeypatch.setattr(selfcheck, "rehearsal", rehearsal)
    monkeypatch.setattr(type(step), "backward", backward)
    monkeypatch.setattr(selfcheck, "_has_kernels", lambda device: True)
    before = {name: tensor.clone() for name, tensor in step.method.state_dict().items()}
    drawn = step.generator.get_state()
    assert compare_kernels(step, 0, 0.5) == ""
    assert happened == ["begins", "pass", "ends", "pass", "pass"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.method.state_dict().items())
    assert torch.equal(step.generator.get_state(), drawn)


@pytest.mark.parametrize(
    ("value", "slope", "named"), [(1.1, 0.0, "loss"), (float("nan"), 0.0, "loss"), (1.0, 1e3, "cosine")]
)
def test_a_wrong_kernel_is_found_and_left_out(
    step: TrainStep,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    value: float,
    slope: float,
    named: str,
) -> None:
    monkeypatch.setattr(fused, "_switched_off", frozenset())
    break_fused(step, monkeypatch, value, slope)
    with caplog.at_level(logging.WARNING):
        assert named in use_plain_kernels_if_fused_disagree(step, 0, 0.5)
    assert "training without them" in caplog.text
    assert fused._switched_off == frozenset(fused.OPERATIONS)
    assert compare_kernels(step, 0, 0.5) == ""
