"""Learning rate, optimisers and the average of weights, by hand numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pclmix.config import Optim
from pclmix.engine.optim import Optimizer, WeightAverage, learning_rate

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


SETTINGS = [
    Optim(lr=0.1, momentum=0.9, weight_decay=0.25),
    Optim(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.0),
    Optim(lr=0.1, momentum=0.0),
    Optim(name="adamw", lr=0.1, weight_decay=0.25),
]


def theirs(parameters: list[nn.Parameter], config: Optim) -> torch.optim.Optimizer:
    if config.name == "adamw":
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        parameters, config.lr, config.momentum, nesterov=config.nesterov, weight_decay=config.weight_decay
    )


@pytest.mark.parametrize("config", SETTINGS)
def test_torch_s_own_optimiser_does_the_same(config: Optim) -> None:
    """Over six steps with another rate each and a parameter that has a gradient every other time."""
    torch.manual_seed(0)
    first = [torch.randn(3, 2), torch.randn(4)]
    ours, other = ([nn.Parameter(w.clone()) for w in first] for _ in range(2))
    optimizer, reference = Optimizer(ours, config, CPU), theirs(other, config)
    for number in range(6):
        optimizer.set_learning_rate(0.1 / (number + 1))
        reference.param_groups[0]["lr"] = 0.1 / (number + 1)
        for index, (a, b) in enumerate(zip(ours, other, strict=True)):
            a.grad = torch.randn(a.shape) if index == 0 or number % 2 else None
            b.grad = None if a.grad is None else a.grad.clone()
        optimizer.step()
        reference.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))


@pytest.mark.parametrize("config", SETTINGS)
def test_an_optimiser_survives_save_and_load(config: Optim) -> None:
    torch.manual_seed(0)
    weight, gradients = torch.randn(5), torch.randn(4, 5)
    whole, cut = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    one, two = Optimizer([whole], config, CPU), Optimizer([cut], config, CPU)
    for number, gradient in enumerate(gradients):
        if number == 2:
            saved = {"state": {0: {k: v.clone() for k, v in two.state_dict()["state"][0].items()}}}
            two = Optimizer([cut], config, CPU)
            places = {name: tensor.data_ptr() for name, tensor in two.state[0].items()}
            two.load_state_dict(saved)
            assert {name: tensor.data_ptr() for name, tensor in two.state[0].items()} == places
        for parameter, optimizer in ((whole, one), (cut, two)):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("config", SETTINGS)
def test_what_torch_s_own_optimiser_saved_is_gone_on_with(config: Optim) -> None:
    """A checkpoint of an earlier version; one parameter is not trained, another never had a gradient."""
    torch.manual_seed(0)
    first, gradients = torch.randn(5), torch.randn(4, 5)
    names = ("fixed", "trained", "idle")
    ours, other = ({name: nn.Parameter(first.clone(), name != "fixed") for name in names} for _ in range(2))
    reference = theirs(list(other.values()), config)
    for gradient in gradients[:2]:
        ours["trained"].data.copy_(other["trained"])
        other["trained"].grad = gradient.clone()
        reference.step()
    ours["trained"].data.copy_(other["trained"])
    optimizer = Optimizer(ours.values(), config, CPU)
    optimizer.load_state_dict(reference.state_dict())
    for gradient in gradients[2:]:
        ours["trained"].grad, other["trained"].grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    assert all(torch.equal(ours[name], other[name]) for name in names)


def test_nothing_is_kept_of_what_is_not_trained_or_has_no_momentum() -> None:
    teacher, student = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    assert set(Optimizer([teacher, student], Optim(), CPU).state) == {1}
    assert Optimizer([student], Optim(momentum=0.0), CPU).state_dict() == {"state": {0: {}}}


def test_a_rate_in_a_tensor_stays_where_it_is() -> None:
    optimizer = Optimizer([nn.Parameter(torch.ones(2))], Optim(lr=0.1), CPU)
    rate = optimizer.lr = torch.tensor(0.1)
    optimizer.set_learning_rate(0.25)
    assert optimizer.lr is rate
    assert float(rate) == 0.25


def test_sgd_by_hand() -> None:
    """Two steps with momentum 0.5 and weight decay 0.1 on a gradient of 1."""
    weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = Optimizer([weight], Optim(lr=0.1, momentum=0.5, weight_decay=0.1), CPU)
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
