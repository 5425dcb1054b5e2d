"""Training in separate processes, for the tests of resume and of several ranks.

As a script it is the `pclmix` command that also records what every rank holds after every step. As a module it is what
a process forked from a server with all imports runs: the same training without the seconds that imports take.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from pclmix.data.batch import Batch
from pclmix.errors import PclmixError
from pclmix.methods.base import METHODS, Method, Term, Terms
from pclmix.methods.pce import PCE
from pclmix.registry import Registry
from pclmix.training import trainer
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training
from pclmix.training.step import TrainStep


def train(environment: dict[str, str], answer: str, *args: Any, **kwargs: Any) -> None:
    """`run_training` under `environment`; its result or error goes to the file `answer`."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    register()
    if "TRACE" in os.environ:
        trace(Path(os.environ["TRACE"]))
    if "OPENS" in os.environ:
        count_opens(Path(os.environ["OPENS"]))
    if "DOUBLE" in os.environ:  # rounding in float32 grows with every step until it hides what is compared
        torch.set_default_dtype(torch.float64)
        trainer.write_results = lambda *_: None
    try:
        said: Any = run_training(TrainRequest(*args, **kwargs))
    except PclmixError as error:
        said = str(error)
    Path(answer).write_text(json.dumps(said))


def count_opens(folder: Path) -> None:
    """Append the path of each file that Python opens to a file of this process; this cannot be undone."""
    log = (folder / f"opens{os.environ.get('RANK', '')}.txt").open("a", buffering=1)

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str):
            log.write(arguments[0] + "\n")

    sys.addaudithook(note)


def trace(folder: Path) -> None:
    """Record digests of what ranks share in folder/RANK.jsonl; INTERRUPT="rank step" sends Ctrl-C, KILL kills."""
    call = TrainStep.__call__

    def noting(self: TrainStep, step: int, progress: float) -> None:
        call(self, step, progress)
        rank = os.environ["LOCAL_RANK"]
        state = self.method.state_dict()
        running = [v for k, v in state.items() if "running_" in k]
        line = {
            "step": step,
            "index": self.feed.index.tolist(),
            "loss": float(self.values[0]),
            "gradients": digest(p.grad for p in self.gradients.parameters if p.grad is not None),
            "weights": digest(self.method.parameters()),
            "batchnorm": digest(running),
            "batchnorm_layers": len(running),
            "queue": digest(v for k, v in state.items() if k.startswith("queue.")),
            "prototypes": int(state["queue.count"].sum()) if "queue.count" in state else 0,
        }
        with (folder / f"{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        for name, number in (("INTERRUPT", signal.SIGINT), ("KILL", signal.SIGKILL)):
            if os.environ.get(name) == f"{rank} {step}":
                os.kill(os.getpid(), number)

    TrainStep.__call__ = noting  # type: ignore[method-assign]


def digest(tensors: Iterable[Tensor | nn.Parameter]) -> str:
    """A hash of the bytes of all tensors together."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


class Diverging(PCE):
    """pCE with a second term that is NaN from step 3 of 4 on, on the last rank alone."""

    summary: ClassVar[str] = "for tests"
    source: ClassVar[str] = "for tests"

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        last = int(os.environ.get("WORLD_SIZE", "1")) - 1
        guilty = int(os.environ.get("RANK", "0")) == last
        poison = torch.where(progress >= 0.5, torch.nan, 0.0) if guilty else torch.zeros_like(progress)
        return {**super().step(batch, progress, generator), "poison": Term(poison)}


class Steep(PCE):
    """pCE with a second term that is 0, whose gradient is infinite from step 3 of 4 on."""

    summary: ClassVar[str] = "for tests"
    source: ClassVar[str] = "for tests"

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        weight = next(self.net.parameters())
        cliff = ((weight - weight.detach()) * torch.where(progress >= 0.5, torch.inf, 1.0)).clamp(-1, 1)
        return {**super().step(batch, progress, generator), "cliff": Term(cliff.nan_to_num().sum())}


OWN: dict[str, type[Method]] = {"diverging": Diverging, "steep": Steep}


def register(methods: Registry[type[Method]] = METHODS) -> None:
    """Add the methods above; only in a separate process, so that other tests do not find them."""
    for name, method in OWN.items():
        methods.register(name)(method)


if __name__ == "__main__":
    from pclmix.cli import main

    register()
    trace(Path(os.environ["TRACE"]))
    sys.exit(main())
