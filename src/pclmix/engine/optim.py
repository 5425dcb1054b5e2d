"""Optimiser, learning rate and the average of the weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pclmix.config import Optim


def learning_rate(progress: float, config: Optim) -> float:
    """lr_end + (lr - lr_end) (1 - t/T)^power, after a linear rise over the first `warmup` of training.

    >>> learning_rate(0.0, Optim(lr=0.03, lr_end=0.001)), learning_rate(1.0, Optim(lr=0.03, lr_end=0.001))
    (0.03, 0.001)
    """
    decayed: float = config.lr_end + (config.lr - config.lr_end) * (1.0 - min(progress, 1.0)) ** config.power
    return decayed * min(1.0, progress / config.warmup) if config.warmup > 0 else decayed


def build_optimizer(parameters: Iterable[nn.Parameter], config: Optim, device: torch.device) -> torch.optim.Optimizer:
    """SGD or AdamW; on CUDA fused, with the learning rate in a tensor so that a captured graph can follow it."""
    cuda = device.type == "cuda"
    lr: float | Tensor = torch.tensor(config.lr, device=device) if cuda else config.lr
    if config.name == "adamw":
        return torch.optim.AdamW(
            parameters, lr=lr, weight_decay=config.weight_decay, fused=cuda or None, capturable=cuda
        )
    return torch.optim.SGD(
        parameters,
        lr=lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        fused=cuda or None,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


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
