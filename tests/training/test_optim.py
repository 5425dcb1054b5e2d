"""Learning rate, optimisers and the average of weights, by hand numbers."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pclmix.config import Optim
from pclmix.training.optim import (
    WeightAverage,
    learning_rate,
    load_optimizer,
    make_optimizer,
    preload,
    set_learning_rate,
)

CPU = torch.device("cpu")


def test_learning_rate_of_the_paper() -> None:
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


SETTINGS = [Optim(lr=0.1, momentum=0.9, weight_decay=0.25), Optim(name="adamw", lr=0.1, weight_decay=0.25)]


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4)), nn.Parameter(torch.ones(2), False)]


def steps(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], numbers: range) -> None:
    """Steps with another rate each; the second parameter has a gradient every other time."""
    for number in numbers:
        set_learning_rate(optimizer, 0.1 / (number + 1))
        generator = torch.Generator().manual_seed(number)
        weights[0].grad = torch.randn(weights[0].shape, generator=generator)
        weights[1].grad = torch.randn(weights[1].shape, generator=generator) if number % 2 else None
        optimizer.step()


@pytest.mark.parametrize("config", SETTINGS)
def test_an_optimizer_continues_from_its_state(config: Optim) -> None:
    whole, first, second = parameters(), parameters(), parameters()
    steps(make_optimizer(whole, config, CPU), whole, range(6))
    before = make_optimizer(first, config, CPU)
    steps(before, first, range(3))
    for new, old in zip(second, first, strict=True):
        new.data.copy_(old)
    after = make_optimizer(second, config, CPU)
    load_optimizer(after, before.state_dict())
    steps(after, second, range(3, 6))
    assert all(torch.equal(one, other) for one, other in zip(whole, second, strict=True))
    assert torch.equal(second[2], torch.ones(2)), "a parameter that is not trained does not move"


def test_options_of_another_device_are_not_loaded() -> None:
    """A state saved on a GPU is of a fused update with its rate in a tensor there; the rate itself is state."""
    saved = make_optimizer(parameters(), Optim(), CPU).state_dict()
    saved["param_groups"][0] |= {"fused": True, "lr": torch.tensor(9.0)}
    optimizer = make_optimizer(parameters(), Optim(lr=0.1), CPU)
    load_optimizer(optimizer, saved)
    assert optimizer.param_groups[0]["fused"] is None
    assert optimizer.param_groups[0]["lr"] == 9.0
    assert isinstance(optimizer.param_groups[0]["lr"], float)


def test_learning_rate_tensor_is_changed_in_place() -> None:
    optimizer = make_optimizer(parameters(), Optim(lr=0.1), CPU)
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    set_learning_rate(optimizer, 0.25)
    load_optimizer(optimizer, optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


def test_sgd_by_hand() -> None:
    """Two steps with momentum 0.5 and weight decay 0.1 on a gradient of 1."""
    weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = make_optimizer([weight], Optim(lr=0.1, momentum=0.5, weight_decay=0.1), CPU)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    v1 = 1 + 0.1 * 2
    w1 = 2 - 0.1 * v1
    v2 = 0.5 * v1 + 1 + 0.1 * w1
    assert weight.item() == pytest.approx(w1 - 0.1 * v2)


def test_the_compiler_is_imported_in_a_thread() -> None:
    preload().join()
    assert "torch._dynamo" in sys.modules


def test_weight_average_is_that_of_past_states() -> None:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    average = WeightAverage(net, 0.9)
    seen = [2.0, -1.0, 5.0]
    for value in seen:
        with torch.no_grad():
            net[0].weight.fill_(value)
            net[1].running_mean.fill_(10 * value)
        average.update()
        average.count()
    weights = [0.1 * 0.9**2, 0.1 * 0.9, 0.1]
    expected = sum(w * v for w, v in zip(weights, seen, strict=True)) / sum(weights)
    state = average.state_dict().weights(0.9)
    assert state["0.weight"].item() == pytest.approx(expected, rel=1e-5)
    assert state["1.running_mean"].item() == pytest.approx(10 * expected, rel=1e-5)
    assert set(state) == {"0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var"}


def test_the_average_after_one_step_is_the_weights() -> None:
    net = nn.Linear(3, 2)
    average = WeightAverage(net, 0.999)
    average.update()
    average.count()
    torch.testing.assert_close(average.state_dict().weights(0.999)["weight"], net.weight.detach(), rtol=1e-4, atol=0)


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
    assert all(torch.equal(one._sum[k], two._sum[k]) for k in range(2))


def test_adamw_step_counter_device() -> None:
    """Saved on a CPU the count is on the host; a captured update reads it on the device, here `meta`."""
    config, weights = Optim(name="adamw"), parameters()
    saved = make_optimizer(weights, config, CPU)
    steps(saved, weights, range(3))
    moved = [nn.Parameter(weight.detach().to("meta"), weight.requires_grad) for weight in weights]
    loaded = torch.optim.AdamW([weight for weight in moved if weight.requires_grad], lr=config.lr, capturable=True)
    load_optimizer(loaded, saved.state_dict())
    assert {state["step"].device.type for state in loaded.state.values()} == {"meta"}
    back = make_optimizer(weights, config, CPU)
    on_a_gpu = saved.state_dict()
    on_a_gpu["param_groups"][0]["capturable"] = True
    load_optimizer(back, on_a_gpu)
    assert [float(state["step"]) for state in back.state.values()] == [3.0, 1.0]
