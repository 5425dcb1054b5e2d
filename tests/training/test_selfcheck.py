"""The check of the fused kernels before training: it finds differences and restores all state."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor

from pclmix import kernels
from pclmix.config import load_config
from pclmix.data.batch import Batch
from pclmix.data.dataset import Dataset
from pclmix.data.store import Settings, open_store
from pclmix.methods.base import Term, Terms, build_method
from pclmix.training import probe
from pclmix.training.feed import Feed
from pclmix.training.probe import compare_kernels, use_plain_kernels_if_fused_disagree
from pclmix.training.step import Gradients


@pytest.fixture
def gradients(phantom: Path) -> Gradients:
    dataset = Dataset.open(phantom)
    store = open_store(dataset, dataset.cases, Settings((64, 64)))
    config = load_config("tiny", "pclmix")
    torch.manual_seed(0)
    method = build_method(config, 1, 4, len(store)).train()
    feed = Feed(store, config.engine.batch, config.seed, torch.device("cpu"))
    return Gradients(method, feed, config, Generator().manual_seed(3))


def break_fused(gradients: Gradients, monkeypatch: pytest.MonkeyPatch, value: float, slope: float) -> None:
    """As if the fused kernels changed a loss by a factor, or the gradient of the first weights."""
    right = type(gradients.method).step

    def wrong(self: object, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        terms = right(self, batch, progress, generator)  # type: ignore[arg-type]
        if not kernels._switched_off:
            sup = terms["sup"].value * value
            weight = gradients.method.net.encoder.conv1.weight  # type: ignore[union-attr]
            terms["sup"] = Term(sup + slope * (weight - weight.detach()).sum())  # type: ignore[operator]
        return terms

    monkeypatch.setattr(type(gradients.method), "step", wrong)


def test_agreement_restores_the_network(gradients: Gradients) -> None:
    before = {name: tensor.clone() for name, tensor in gradients.method.state_dict().items()}
    drawn, common = gradients.generator.get_state(), torch.get_rng_state()
    assert compare_kernels(gradients, 0, 0.5) == ""
    assert all(torch.equal(tensor, before[name]) for name, tensor in gradients.method.state_dict().items())
    assert torch.equal(gradients.generator.get_state(), drawn)
    assert torch.equal(torch.get_rng_state(), common)
    assert all(parameter.grad is None for parameter in gradients.parameters)


def test_compiles_kernels_first_and_restores_all_state(gradients: Gradients, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    @contextmanager
    def compile_ahead() -> Iterator[None]:
        happened.append("begins")
        yield
        happened.append("ends")

    right = Gradients.__call__

    def noted(self: Gradients) -> dict[str, Tensor]:
        happened.append("pass")
        return right(self)

    monkeypatch.setattr(probe, "compile_ahead", compile_ahead)
    monkeypatch.setattr(Gradients, "__call__", noted)
    monkeypatch.setattr(probe, "_has_kernels", lambda device: True)
    before = {name: tensor.clone() for name, tensor in gradients.method.state_dict().items()}
    drawn = gradients.generator.get_state()
    assert compare_kernels(gradients, 0, 0.5) == ""
    assert happened == ["begins", "pass", "ends", "pass", "pass"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in gradients.method.state_dict().items())
    assert torch.equal(gradients.generator.get_state(), drawn)


@pytest.mark.parametrize(
    ("value", "slope", "named"), [(1.1, 0.0, "loss"), (float("nan"), 0.0, "loss"), (1.0, 1e3, "cosine")]
)
def test_a_wrong_kernel_is_found_and_left_out(
    gradients: Gradients,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    value: float,
    slope: float,
    named: str,
) -> None:
    monkeypatch.setattr(kernels, "_switched_off", frozenset())
    break_fused(gradients, monkeypatch, value, slope)
    with caplog.at_level(logging.WARNING):
        assert named in use_plain_kernels_if_fused_disagree(gradients, 0, 0.5)
    assert named in caplog.text
    assert kernels._switched_off == frozenset(kernels.OPERATIONS)
    assert compare_kernels(gradients, 0, 0.5) == ""
