"""Weights cast together are the weights that autocast casts one at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pclmix.training.step import cast_weights


class Kept(nn.Module):
    full_precision = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        assert self.layer.weight.dtype == torch.float32
        y: Tensor = self.layer(x)
        return y


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 6), Kept(), nn.Linear(3, 3))


def gradients(model: nn.Sequential, x: Tensor, together: bool) -> list[Tensor | None]:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        if together:
            with cast_weights(model, torch.bfloat16):
                assert model[0].weight.dtype == model[3].bias.dtype == torch.bfloat16
                assert model[1].weight.dtype == torch.float32
                y = model[:5](x)
        else:
            y = model[:5](x)
    y.float().square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_gradients_are_those_of_autocast() -> None:
    x = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    together, apart = gradients(network(), x, True), gradients(network(), x, False)
    for a, b in zip(together, apart, strict=True):
        # The last layer is not used: it has no gradient, instead of zeros that weight decay would act on.
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == torch.float32
            assert torch.equal(a, b)
    assert together[-1] is None


def test_parameters_are_back_afterwards() -> None:
    model = network().to(memory_format=torch.channels_last)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with cast_weights(model, torch.bfloat16):
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert model.state_dict().keys() >= before.keys()
    assert model[0].weight.dtype == torch.float32
