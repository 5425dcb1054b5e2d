"""All weights to bf16 at once, instead of one at a time by autocast: two launches a step where there were hundreds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

#: Layers whose operations autocast runs in low precision, and with it would cast their weights.
_CAST = (nn.Conv2d, nn.Linear)


@contextmanager
def cast_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the convolutions and linear layers of `module` that learn see their weights and biases in `dtype`.

    Gradients reach the parameters themselves, in their own type; parameters(), state_dict() and whatever else asks for
    parameters are not changed. A weight that did not take part in the loss has no gradient, as ever. A module that
    declares `full_precision` keeps its weights, and all below it.
    """
    owners = [
        (layer, name)
        for layer in _layers(module)
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.requires_grad
    ]
    weights = [getattr(layer, name) for layer, name in owners]
    copies: tuple[Tensor, ...] = _Cast.apply(dtype, *weights) if weights else ()  # type: ignore[no-untyped-call]
    for (layer, name), copy in zip(owners, copies, strict=True):
        # An attribute in the instance's dictionary is found before nn.Module looks among its parameters.
        layer.__dict__[name] = copy
    try:
        yield
    finally:
        for layer, name in owners:
            del layer.__dict__[name]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    if getattr(module, "full_precision", False):
        return
    if isinstance(module, _CAST):
        yield module
    for child in module.children():
        yield from _layers(child)


class _Cast(torch.autograd.Function):
    """Many tensors to another type, and their gradients back, each way as one multi-tensor copy."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.weights = [(weight.dtype, weight.shape, weight.stride(), weight.device) for weight in weights]
        copies = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(copies, weights)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        result: list[Tensor | None] = [
            None if g is None else torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for g, (dtype, shape, stride, device) in zip(gradients, ctx.weights, strict=True)
        ]
        torch._foreach_copy_([r for r in result if r is not None], [g for g in gradients if g is not None])
        return None, *result
