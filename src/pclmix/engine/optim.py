"""Optimiser, learning rate and the average of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from pclmix.config import Optim


def learning_rate(progress: float, config: Optim) -> float:
    """lr_end + (lr - lr_end) (1 - t/T)^power, after a linear rise over the first `warmup` of training.

    >>> learning_rate(0.0, Optim(lr=0.03, lr_end=0.001)), learning_rate(1.0, Optim(lr=0.03, lr_end=0.001))
    (0.03, 0.001)
    """
    decayed: float = config.lr_end + (config.lr - config.lr_end) * (1.0 - min(progress, 1.0)) ** config.power
    return decayed * min(1.0, progress / config.warmup) if config.warmup > 0 else decayed


class Optimizer:
    """SGD or AdamW by torch's own functions; on CUDA fused, with the learning rate in a tensor that a graph can follow.

    Not one of torch's classes: to make one imports torch's compiler, seconds before the first step that nobody needs.
    `state` has a table of tensors for each parameter that is trained, numbered and named as theirs.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: Optim, device: torch.device) -> None:
        self.config, self.cuda = config, device.type == "cuda"
        self.parameters = list(parameters)
        self.lr: float | Tensor = torch.tensor(config.lr, device=device) if self.cuda else config.lr
        self.state = {i: self._fresh(p, device) for i, p in enumerate(self.parameters) if p.requires_grad}

    def _fresh(self, parameter: nn.Parameter, device: torch.device) -> dict[str, Tensor]:
        if self.config.name == "adamw":
            step = torch.zeros((), device=device if self.cuda else None)
            return {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter), "step": step}
        # A first step on momentum of 0 is torch's first step, which begins with the gradient.
        return {"momentum_buffer": torch.zeros_like(parameter)} if self.config.momentum > 0 else {}

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        moved = [(p, p.grad, self.state[i]) for i, p in enumerate(self.parameters) if p.grad is not None]
        parameters: list[Tensor] = [parameter for parameter, _, _ in moved]
        gradients = [gradient for _, gradient, _ in moved]
        config = self.config
        common: dict[str, Any] = {"lr": self.lr, "weight_decay": config.weight_decay, "maximize": False}
        common["fused"] = self.cuda or None
        if config.name == "adamw":
            adamw(
                parameters,
                gradients,
                [state["exp_avg"] for _, _, state in moved],
                [state["exp_avg_sq"] for _, _, state in moved],
                [],
                [state["step"] for _, _, state in moved],
                capturable=self.cuda,
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                **common,
            )
        else:
            momentum: dict[str, Any] = {"momentum": config.momentum, "nesterov": config.nesterov, "dampening": 0.0}
            sgd(parameters, gradients, [state.get("momentum_buffer") for _, _, state in moved], **momentum, **common)

    def set_learning_rate(self, value: float) -> None:
        if isinstance(self.lr, Tensor):
            self.lr.fill_(value)
        else:
            self.lr = value

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, content: Mapping[str, Any]) -> None:
        """Into a new optimiser, in place, so that a captured graph goes on with it.

        What torch's own ones save fits, too; of a parameter that never had a gradient they save nothing.
        """
        for number, state in self.state.items():
            saved = content["state"].get(number, {})
            for name in state.keys() & saved.keys():
                state[name].copy_(saved[name])


class WeightAverage:
    """Exponential average of parameters and BatchNorm statistics, without the weight of the start.

    The sum begins at zero and `state` divides by 1 - decay^t, so that after t steps it is the average of just those
    t states, however few they are.
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

    def state(self) -> dict[str, Tensor]:
        """Averaged weights by name; empty before the first step."""
        if self.steps == 0:
            return {}
        scale = 1.0 / (1.0 - self.decay**self.steps)
        return {name: tensor * scale for name, tensor in zip(self._names, self._sum, strict=True)}

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps, "sum": dict(zip(self._names, self._sum, strict=True))}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.steps = int(state["steps"])  # type: ignore[call-overload]
        stored: dict[str, Tensor] = state["sum"]  # type: ignore[assignment]
        for name, tensor in zip(self._names, self._sum, strict=True):
            tensor.copy_(stored[name])
