"""Distributed training: process groups of torchrun's ranks, BatchNorm over ranks, small collectives."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pclmix.errors import PclmixError
from pclmix.kernels.collective import sum_over_ranks, world_size
from pclmix.nets.segmenter import device_kind
from pclmix.training.request import TrainRequest


def synchronise_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm of `module` by one with statistics over all ranks; returns the module to use.

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


#: Exit status of a rank that stops because another rank has ended, which the launcher reports.
LOST = 75
_TIMEOUT = timedelta(hours=12)  # limit while rank 0 prepares a dataset; a dead rank is detected at once
_RANK_0_FIRST = 10.0  # seconds
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Process:
    """This process among the ranks. `distributed`: started by torchrun, even if it is the only one."""

    device: torch.device
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    distributed: bool = False

    @property
    def first(self) -> bool:
        return self.rank == 0


def with_torchrun(request: TrainRequest) -> TrainRequest:
    """The request with the numbers of devices and nodes that torchrun started, where it did."""
    if not dist.is_torchelastic_launched():
        return request
    local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    started = (local, world // local)
    if (request.devices, request.nodes) not in ((1, 1), started):
        raise PclmixError(
            f"--devices {request.devices} --nodes {request.nodes}: torchrun started {local} process(es) on each of "
            f"{started[1]} node(s); leave both options out or give the same"
        )
    return replace(request, devices=local, nodes=started[1])


def require_devices(device: str, devices: int = 1) -> str:
    """cpu or cuda; refused where there are fewer CUDA devices than asked for."""
    kind = device_kind(device)
    if kind == "cuda" and devices > torch.cuda.device_count():
        raise PclmixError(f"--devices {devices}: only {torch.cuda.device_count()} CUDA device(s) here")
    return kind


@contextmanager
def join(device: str, devices: int = 1) -> Iterator[Process]:
    """Inside, the process groups exist; without torchrun there are none.

    Small messages use gloo, which detects a dead peer at once; CUDA tensors use NCCL.
    """
    if not dist.is_torchelastic_launched():
        kind = require_devices(device)
        yield Process(torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind))
        return
    process = _connect(device, devices)
    try:
        yield process
    except RuntimeError as error:
        if not _is_lost_peer(error):
            raise
        log.info("rank %d stops: another rank has ended (%s)", process.rank, error)
        raise SystemExit(LOST) from error
    # Only after success: a communicator with lost peers may never shut down.
    dist.destroy_process_group()


def _connect(name: str, devices: int) -> Process:
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    try:
        kind = require_devices(name, devices)
    except PclmixError:
        # Usually all ranks find the same mistake. Rank 0 reports it and torchrun ends the others.
        time.sleep(0 if rank == 0 else _RANK_0_FIRST)
        raise
    device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
        # A thread that polls NCCL's events would break the capture of a CUDA graph.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=_TIMEOUT)
    return Process(device, rank, world, local, distributed=True)


def _is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because a peer was lost."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def gather_objects(item: Any) -> list[Any]:
    """Plain objects of all ranks, in rank order, on every rank. Uses gloo, which detects an ended rank."""
    if world_size() == 1:
        return [item]
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, item)
    return parts


def from_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    """Broadcast a tensor in host memory from rank 0, in place."""
    if world_size() > 1:
        dist.broadcast(tensor, 0)
    return tensor


def largest(values: Sequence[float]) -> list[float]:
    """The maximum of each value over all ranks, for common decisions."""
    return _reduced(values, dist.ReduceOp.MAX)


def mean(values: Sequence[float]) -> list[float]:
    """The mean of each value over all ranks."""
    return [value / world_size() for value in _reduced(values, dist.ReduceOp.SUM)]


def _reduced(values: Sequence[float], operation: Any) -> list[float]:
    if world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=operation)
    reduced: list[float] = tensor.tolist()
    return reduced
