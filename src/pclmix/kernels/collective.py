"""Operations over all ranks that train together; with one process each returns its input or the identity.

Every rank must call them in the same order. They run on the tensor's own device and can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_rows(rows: Tensor) -> Tensor:
    """Concatenate `rows` (N, ...) of all ranks in rank order, detached; every rank gets the same tensor."""
    if world_size() == 1:
        return rows.detach()
    parts = [torch.empty_like(rows) for _ in range(world_size())]
    dist.all_gather(parts, rows.detach().contiguous())
    return torch.cat(parts)


def common_count(count: Tensor) -> Tensor:
    """A number of pixels averaged over ranks, at least 1 in total: the denominator of a mean over the whole batch.

    Data-parallel training averages gradients over ranks. A loss that divides its sum by this count has the
    gradient of the mean over the pixels of all ranks, however they are distributed.
    """
    if world_size() == 1:
        return count.clamp(min=1)
    total = count.detach().to(torch.float32, copy=True)
    dist.all_reduce(total)
    return total.clamp(min=1) / world_size()


def sum_over_ranks(x: Tensor) -> Tensor:
    """`x` summed over all ranks, differentiable."""
    if world_size() == 1:
        return x
    total: Tensor = _Sum.apply(x)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """Each rank's value enters every rank's loss, so gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total
