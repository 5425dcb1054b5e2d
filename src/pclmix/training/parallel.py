"""Several processes that train as one: join the ranks that torchrun started, agree with them, leave together."""

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

from pclmix.errors import PclmixError
from pclmix.kernels.collective import world_size
from pclmix.nets.device import device_kind
from pclmix.training.request import TrainRequest

#: Exit status of a rank that stops because another one has ended. The launcher reports that other one.
LOST = 75
_TIMEOUT = timedelta(hours=12)  # ranks wait that long while rank 0 prepares a dataset; a dead rank is noticed at once
_RANK_0_FIRST = 10.0  # seconds
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Process:
    """This process among those that train together. `distributed`: started by torchrun, even if it is the only one."""

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
    """Within, this process and its peers can communicate; without torchrun there are none.

    Small messages travel over gloo, which notices a dead peer at once; tensors on CUDA over NCCL.
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
    # Only after success: a communicator whose peers are gone may never shut down.
    dist.destroy_process_group()


def _connect(name: str, devices: int) -> Process:
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    try:
        kind = require_devices(name, devices)
    except PclmixError:
        # All ranks find the same mistake as a rule. Rank 0 says so and torchrun ends the others, unless it is alone.
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
    """Whether a collective failed because a peer is gone, rather than this rank's own work."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def gather_objects(item: Any) -> list[Any]:
    """Plain objects of all ranks, in rank order, on every rank. Over gloo, which notices when a rank has ended."""
    if world_size() == 1:
        return [item]
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, item)
    return parts


def from_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's content of a tensor in host memory, in place on every rank."""
    if world_size() > 1:
        dist.broadcast(tensor, 0)
    return tensor


def largest(values: Sequence[float]) -> list[float]:
    """The largest of each value over all ranks, for decisions that all ranks must take alike."""
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
