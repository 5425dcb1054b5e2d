"""BatchNorm over the batch of all processes, on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pclmix.distributed import world_size


def synchronise_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm of `module` by one whose statistics span all processes; returns the module to use.

    Equals plain BatchNorm on the concatenated batch: output, gradients and running statistics. Parameters, buffers and
    state-dict keys are kept. With one process nothing changes. Call it where the module already is on its device:
    torch's SyncBatchNorm is taken on an accelerator; it refuses CPU tensors, so there ReducedBatchNorm takes its place.
    """
    if world_size() == 1:
        return module
    if any(parameter.device.type != "cpu" for parameter in module.parameters()):
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        return converted
    return _reduce_batchnorm(module)


def _reduce_batchnorm(module: nn.Module) -> nn.Module:
    if isinstance(module, ReducedBatchNorm):  # reached a second time through another parent
        return module
    if isinstance(module, _BatchNorm):
        return ReducedBatchNorm.like(module)
    for name, child in module.named_children():
        setattr(module, name, _reduce_batchnorm(child))
    return module


class ReducedBatchNorm(_BatchNorm):
    """BatchNorm on (B, C, ...) whose mean and variance come from sums over all processes, which gradients pass too."""

    @classmethod
    def like(cls, other: _BatchNorm) -> ReducedBatchNorm:
        """The same layer, sharing its parameters and buffers."""
        layer = cls(other.num_features, other.eps, other.momentum, other.affine, other.track_running_stats)
        layer.weight, layer.bias = other.weight, other.bias
        layer.running_mean, layer.running_var = other.running_mean, other.running_var
        layer.num_batches_tracked = other.num_batches_tracked
        return layer.train(other.training)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected (B, C, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training and self.track_running_stats:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
            )
        x = input.float()
        axes = [0, *range(2, x.ndim)]
        shape = (1, -1, *[1] * (x.ndim - 2))
        # Processes may hold different numbers of images, so the count is summed as well.
        count = torch.full((1,), x.numel() / x.shape[1], dtype=x.dtype)
        reduced = sum_over_processes(torch.cat([x.sum(axes), count]))
        count = reduced[-1].detach()
        mean = reduced[:-1] / count
        # A second sum, of squared distances to the common mean: E[x^2] - E[x]^2 would cancel.
        centred = x - mean.view(shape)
        variance = sum_over_processes(centred.square().sum(axes)) / count
        if self.training:
            self._track(mean.detach(), variance.detach(), count)
        y = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, rate)
        self.running_var.lerp_(variance * count / (count - 1), rate)


class _Sum(torch.autograd.Function):
    """The sum over processes. Each process's value enters every process's loss, so gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


def sum_over_processes(x: Tensor) -> Tensor:
    """`x` summed over all processes, differentiable; `x` itself when there is one."""
    if world_size() == 1:
        return x
    total: Tensor = _Sum.apply(x)  # type: ignore[no-untyped-call]
    return total
