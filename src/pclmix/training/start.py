"""From a request to a trained run folder, in this process or, with several devices, in one process each."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from rich.console import Console

from pclmix.errors import PclmixError
from pclmix.io.files import atomic_path, sweep_leftovers
from pclmix.training import optim
from pclmix.training.checkpoint import LAST
from pclmix.training.claim import claimed
from pclmix.training.log import PLAN
from pclmix.training.parallel import Process, gather_objects, join, require_devices, with_torchrun
from pclmix.training.plan import Plan, make_plan, plans_from_data, require_same_cases
from pclmix.training.planner import DataPlan
from pclmix.training.prepare import prepare
from pclmix.training.request import TrainRequest
from pclmix.training.step import DivergedError
from pclmix.training.trainer import Trainer


def run_training(request: TrainRequest, console: Console | None = None) -> bool:
    """Train as `pclmix train` does; True when finished, False when interrupted.

    Several devices get one process each, which this one starts, unless torchrun has started them already. Of
    torchrun's processes rank 0 returns the answer; the others return True, since torchrun takes anything else for a
    failure.
    """
    console = console or Console(stderr=True)
    request = with_torchrun(request)
    if request.world > 1 and not dist.is_torchelastic_launched():
        from pclmix.training.launch import launch

        require_devices(request.device, request.devices)
        if plans_from_data(request):
            return launch(request)
        plan = make_plan(request)  # refuses mistakes before any process is started
        return _is_finished(plan, console) or launch(request)
    with join(request.device, request.devices) as process, claimed(request.out) if process.first else nullcontext():
        plan = _shared_plan(request, process)
        quiet = console if process.first else Console(quiet=True)
        finished = _is_finished(plan, quiet) or _train(plan, process, quiet)
        if process.first:
            sweep_leftovers(request.out, older=600)
        return finished


def _shared_plan(request: TrainRequest, process: Process) -> Plan:
    """Rank 0 makes the plan, then the others do: what rank 0 refuses ends the job with one message."""
    own = make_plan(request) if process.first else None
    planned: DataPlan | None = gather_objects(own and own.planned)[0]
    return own or make_plan(request, planned)


def _is_finished(plan: Plan, console: Console) -> bool:
    if plan.is_finished and plan.checkpoint is not None:
        _say(console, f"{plan.out} is finished already: {plan.checkpoint.step} steps. Nothing to do.")
        return True
    return False


def _train(plan: Plan, process: Process, console: Console) -> bool:
    """Prepare the data, train, and say how it ended."""
    config, out = plan.config, plan.out
    for note in plan.notes:
        _say(console, note)
    imported = optim.preload()
    data = prepare(plan, process, console)
    if plan.checkpoint is not None:
        require_same_cases(plan.checkpoint, data.train.cases, plan.dataset, out)
    imported.join()
    if plan.planned is not None and process.first:
        with atomic_path(out / PLAN) as temporary:
            temporary.write_text(plan.planned.text, encoding="utf-8")
    try:
        finished = Trainer(plan, data, process, console).run()
    except DivergedError:
        if process.first:
            raise
        return True
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        raise PclmixError(
            f"out of memory on {process.device.type} with engine.batch={config.engine.batch} and "
            f"data.size={list(config.data.size)}; make one of them smaller, or choose a smaller net than {config.net}"
        ) from error
    again = plan.request.resume_command()
    _say(console, f"finished: {out / LAST}" if finished else f"stopped and saved. Continue with: {again}")
    return finished or not process.first


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory was missing, on the host or the device.

    CUDA, Triton and cuBLAS have words of their own for it. Where it happens while a graph is captured, the end of the
    capture fails too and has the first error as its context.
    """
    while error is not None:
        said = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in said):
            return True
        error = error.__cause__ or error.__context__
    return False


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
