"""What several processes must agree on, as plain functions that do nothing when there is one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_rows(rows: Tensor) -> Tensor:
    """Concatenate `rows` (N, ...) of all ranks in rank order, detached; every rank gets the same tensor."""
    if world_size() == 1:
        return rows.detach()
    parts = [torch.empty_like(rows) for _ in range(world_size())]
    dist.all_gather(parts, rows.detach().contiguous())
    return torch.cat(parts)
