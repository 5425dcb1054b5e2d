"""Learning rate, optimisers and the average of weights, by hand numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pclmix.config import Optim
from pclmix.engine.optim import WeightAverage, build_optimizer, learning_rate, set_learning_rate

CPU = torch.device("cpu")


def test_the_paper_s_learning_rate() -> None:
    paper = Optim(lr=0.03, lr_end=0.001, power=0.9)
    assert learning_rate(0.0, paper) == 0.03
    assert learning_rate(0.5, paper) == pytest.approx(0.001 + 0.029 * 0.5**0.9)
    assert learning_rate(1.0, paper) == 0.001
    assert learning_rate(1.1, paper) == 0.001  # a time budget may be overrun by a step


def test_warmup_rises_linearly() -> None:
    config = Optim(lr=1.0, lr_end=1.0, warmup=0.2)
    assert [learning_rate(p, config) for p in (0.0, 0.05, 0.1, 0.2, 0.9)] == pytest.approx([0, 0.25, 0.5, 1, 1])


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_learning_rate_falls(one: float, two: float) -> None:
    early, late = sorted((one, two))
    assert learning_rate(early, Optim()) >= learning_rate(late, Optim()) >= Optim().lr_end


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_optimisers(name: str, kind: type[torch.optim.Optimizer]) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([weight], Optim(name=name, lr=0.1, weight_decay=0.25), CPU)
    assert isinstance(optimizer, kind)
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    set_learning_rate(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    set_learning_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.25)


def test_sgd_by_hand() -> None:
    """Two steps with momentum 0.5 and weight decay 0.1 on a gradient of 1."""
    weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = build_optimizer([weight], Optim(lr=0.1, momentum=0.5, weight_decay=0.1), CPU)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    v1 = 1 + 0.1 * 2
    w1 = 2 - 0.1 * v1
    v2 = 0.5 * v1 + 1 + 0.1 * w1
    assert weight.item() == pytest.approx(w1 - 0.1 * v2)


def test_the_average_is_that_of_the_states_seen() -> None:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    average = WeightAverage(net, 0.9)
    assert average.state() == {}
    seen = [2.0, -1.0, 5.0]
    for value in seen:
        with torch.no_grad():
            net[0].weight.fill_(value)
            net[1].running_mean.fill_(10 * value)
        average.update()
        average.count()
    weights = [0.1 * 0.9**2, 0.1 * 0.9, 0.1]
    expected = sum(w * v for w, v in zip(weights, seen, strict=True)) / sum(weights)
    state = average.state()
    assert state["0.weight"].item() == pytest.approx(expected, rel=1e-5)
    assert state["1.running_mean"].item() == pytest.approx(10 * expected, rel=1e-5)
    assert set(state) == {"0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var"}


def test_the_average_after_one_step_is_the_weights() -> None:
    net = nn.Linear(3, 2)
    average = WeightAverage(net, 0.999)
    average.update()
    average.count()
    torch.testing.assert_close(average.state()["weight"], net.weight.detach(), rtol=1e-4, atol=0)


def test_the_average_survives_save_and_load() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    one, two = WeightAverage(net, 0.9), WeightAverage(net, 0.9)
    one.update()
    one.count()
    two.load_state_dict(one.state_dict())
    for average in (one, two):
        average.update()
        average.count()
    assert one.steps == two.steps == 2
    assert all(torch.equal(one.state()[name], two.state()[name]) for name in one.state())
