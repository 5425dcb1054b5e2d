"""BatchNorm over the batch of all ranks: torch's SyncBatchNorm on CUDA, a small reduction on CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pclmix.kernels.collective import sum_over_ranks, world_size


def synchronise_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm of `module` by one whose statistics span all ranks; returns the module to use.

    Equals plain BatchNorm on the concatenated batch: output, gradients and running statistics. Parameters, buffers and
    state-dict keys are kept. With one rank nothing changes. SyncBatchNorm refuses CPU tensors, so there
    ReducedBatchNorm takes its place; call this when the module is on its device.
    """
    if world_size() == 1:
        return module
    if any(parameter.is_cuda for parameter in module.parameters()):
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        return converted
    return _reduce(module)


def _reduce(module: nn.Module) -> nn.Module:
    if type(module) is nn.BatchNorm2d:
        return ReducedBatchNorm.like(module)
    for name, child in module.named_children():
        setattr(module, name, _reduce(child))
    return module


class ReducedBatchNorm(nn.BatchNorm2d):
    """BatchNorm on (B, C, H, W) with mean and variance from sums over all ranks, which gradients pass too."""

    @classmethod
    def like(cls, other: nn.BatchNorm2d) -> ReducedBatchNorm:
        """The same layer, sharing its parameters and buffers."""
        layer = cls(other.num_features, other.eps, other.momentum, other.affine, other.track_running_stats)
        layer._parameters.update(other._parameters)
        layer._buffers.update(other._buffers)
        return layer.train(other.training)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        x, axes, shape = input.to(torch.promote_types(input.dtype, torch.float32)), (0, 2, 3), (1, -1, 1, 1)
        # Ranks may hold different numbers of images, so the count is summed as well.
        count = torch.full((1,), x.numel() / x.shape[1], dtype=x.dtype, device=x.device)
        total = sum_over_ranks(torch.cat([x.sum(axes), count]))
        count = total[-1].detach()
        mean = total[:-1] / count
        # A second sum, of squared distances to the common mean: E[x^2] - E[x]^2 would cancel.
        centred = x - mean.view(shape)
        variance = sum_over_ranks(centred.square().sum(axes)) / count
        self._track(mean.detach(), variance.detach() * count / (count - 1))
        y = centred * torch.rsqrt(variance + self.eps).view(shape)
        y = y if self.weight is None else y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, rate)
        self.running_var.lerp_(unbiased_variance, rate)
