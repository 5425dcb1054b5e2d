"""What several processes must agree on, as plain functions that do nothing when there is one process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pclmix.errors import PclmixError


@dataclass(frozen=True)
class Process:
    """This process among those that train together: its device, its number and how many there are."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0


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


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Make every rank's gradients their mean over ranks, in one reduction of one flat tensor.

    A parameter without a gradient counts as zero: a method may leave a part of itself unused on some step.
    """
    if world_size() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    flat /= world_size()
    for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def broadcast_state(module: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    if world_size() > 1:
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, 0)


def largest(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each value over all ranks, on every rank: for what they must decide alike."""
    if world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    agreed: list[float] = tensor.tolist()
    return agreed


def gather_objects(item: Any) -> list[Any]:
    """Plain objects of all ranks, in rank order, on every rank."""
    if world_size() == 1:
        return [item]
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, item)
    return parts


class LostProcessError(PclmixError):
    """Another process ended, and this one waited for it in vain. `spokesman` is true in one of those that are left."""

    def __init__(self, text: str, spokesman: bool) -> None:
        super().__init__(text)
        self.spokesman = spokesman


@contextmanager
def watch_processes() -> Iterator[None]:
    """Within, the end of another process is a LostProcessError that names it, not an error of the network library."""
    if world_size() == 1:
        yield
        return
    known: list[tuple[str, int]] = gather_objects((socket.gethostname(), os.getpid()))
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        lost = _lost(known)
        if not lost and not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        named = " and ".join(f"process {k + 1} of {len(known)} (rank {k}, PID {known[k][1]})" for k in lost)
        left = [k for k, (host, _) in enumerate(known) if host == socket.gethostname() and k not in lost]
        raise LostProcessError(
            f"{named or 'a process on another node'} ended during training", rank() == left[0]
        ) from error


def _lost(known: Sequence[tuple[str, int]]) -> list[int]:
    """Ranks of this machine whose process is gone; its connections close a moment before it is."""
    for _ in range(20):
        gone = [k for k, (host, pid) in enumerate(known) if host == socket.gethostname() and not _alive(pid)]
        if gone:
            return gone
        time.sleep(0.1)
    return []


def _alive(pid: int) -> bool:
    """A killed child that nobody has asked about yet still has its number: Linux says that it is a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    if not Path("/proc/self/stat").is_file():
        return True
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # gone since the question above
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
