"""Optimiser, learning rate and the average of the weights."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pclmix.config import Optim
from pclmix.training.checkpoint import Average


def preload() -> threading.Thread:
    """Import torch.optim's lazy dependencies in a thread, while data are read."""
    thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",), name="import torch._dynamo")
    thread.start()
    return thread


def learning_rate(progress: float, config: Optim) -> float:
    """lr_end + (lr - lr_end) (1 - t/T)^power, after a linear rise over the first `warmup` of training.

    >>> learning_rate(0.0, Optim(lr=0.03, lr_end=0.001)), learning_rate(1.0, Optim(lr=0.03, lr_end=0.001))
    (0.03, 0.001)
    """
    decayed: float = config.lr_end + (config.lr - config.lr_end) * (1.0 - min(progress, 1.0)) ** config.power
    return decayed * min(1.0, progress / config.warmup) if config.warmup > 0 else decayed


def make_optimizer(parameters: Iterable[nn.Parameter], config: Optim, device: torch.device) -> torch.optim.Optimizer:
    """SGD or AdamW for the parameters that are trained.

    On CUDA the update is one fused kernel and the learning rate a tensor, which a captured graph reads at each replay.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    on_cuda = device.type == "cuda"
    lr = torch.tensor(config.lr, device=device) if on_cuda else config.lr
    common: dict[str, Any] = {"lr": lr, "weight_decay": config.weight_decay, "fused": on_cuda or None}
    if config.name == "adamw":
        return torch.optim.AdamW(trained, capturable=on_cuda, **common)
    return torch.optim.SGD(trained, momentum=config.momentum, **common)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Restore the state of every parameter and the learning rate; options such as `fused` keep this device's values."""
    own = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    rate = float(optimizer.param_groups[0]["lr"])
    for group, options in zip(optimizer.param_groups, own, strict=True):
        group.update(options)
        # AdamW keeps its step counter on the host or, when capturable, on the device; torch uses the saved options.
        for parameter, kept in ((p, optimizer.state[p]) for p in group["params"] if p in optimizer.state):
            if "step" in kept:
                kept["step"] = kept["step"].to(parameter.device if group.get("capturable") else "cpu", torch.float32)
    set_learning_rate(optimizer, rate)


class WeightAverage:
    """Exponential average of parameters and BatchNorm statistics, without the weight of the start.

    The sum starts at zero; `Average.weights` divides it by 1 - decay^t, so that after t steps it is the average of
    exactly those t states.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.steps = 0
        running = [
            (f"{prefix}{'.' if prefix else ''}{name}", buffer)
            for prefix, child in module.named_modules()
            if isinstance(child, nn.modules.batchnorm._BatchNorm)
            for name, buffer in child.named_buffers(recurse=False)
            if buffer.is_floating_point()
        ]
        pairs = [*module.named_parameters(), *running]
        self._names = [name for name, _ in pairs]
        self._live = [tensor.detach() for _, tensor in pairs]
        self._sum = [torch.zeros_like(tensor) for tensor in self._live]

    @torch.no_grad()
    def update(self) -> None:
        """Part of the captured step: tensors only. The step count is kept by `count`."""
        torch._foreach_lerp_(self._sum, self._live, 1.0 - self.decay)

    def count(self) -> None:
        self.steps += 1

    def state_dict(self) -> Average:
        return Average(steps=self.steps, sum=dict(zip(self._names, self._sum, strict=True)))

    def load_state_dict(self, state: Average) -> None:
        self.steps = state.steps
        for name, tensor in zip(self._names, self._sum, strict=True):
            tensor.copy_(state.sum[name])
