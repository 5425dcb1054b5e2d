"""From a command to a running loop: the configuration, the devices, a fresh or resumed run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from rich.console import Console

from pclmix.config import Config, load_config, override_config
from pclmix.data.dataset import Dataset
from pclmix.device import device_kind
from pclmix.engine.checkpoint import LAST, load_newest
from pclmix.engine.loop import train
from pclmix.engine.prepare import prepare
from pclmix.engine.runlog import RUN
from pclmix.engine.state import require_same
from pclmix.errors import PclmixError
from pclmix.files import read_json, refuse_existing
from pclmix.methods.base import build_params, find_method


def run_training(
    dataset: Path,
    out: Path,
    *,
    method: str | None = None,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    fold: int | None = None,
    resume: bool = False,
    device: str = "auto",
    devices: int = 1,
    nodes: int = 1,
    console: Console | None = None,
) -> bool:
    """Train into `out` as the command line does; True when finished, False when interrupted.

    A resume repeats the run's own settings where none are given, and refuses others.
    """
    console = console or Console(stderr=True)
    out = Path(out)
    content = load_newest(out) if resume else None
    if content is not None and recipe is None:
        config = override_config(content["config"], method, overrides)
    else:
        config = load_config(recipe or "fast", method, overrides)
    params = build_params(find_method(config.method), config.params)
    config = config.model_copy(update={"params": params.model_dump(mode="json")})
    if not resume:
        refuse_existing(out)
    kind = choose_device(device, devices, nodes)
    data = Dataset.open(dataset)
    if content is not None:
        fold = content["run"]["fold"] if fold is None else fold
        require_same(content, config, data, fold, out)
        if _finished(out, content, config):
            console.print(f"{out} is finished already: {content['step']} steps. Nothing to do.", highlight=False)
            return True
    prepared = prepare(data, config, fold, console)
    fabric = launch(kind, devices, nodes)
    finished = train(data, prepared, out, config, content, fabric, console)
    if fabric.is_global_zero:
        if finished:
            console.print(f"finished: {out / LAST}", highlight=False, soft_wrap=True)
        else:
            console.print(f"stopped and saved. Go on with: pclmix train {dataset} --out {out} --resume", soft_wrap=True)
    return finished


def choose_device(device: str, devices: int = 1, nodes: int = 1) -> str:
    """cpu or cuda, refused with the way out where it cannot be had."""
    kind = device_kind(device)
    if devices < 1 or nodes < 1:
        raise PclmixError(f"--devices {devices} --nodes {nodes}: both must be at least 1")
    if kind == "cuda" and devices > torch.cuda.device_count():
        raise PclmixError(f"--devices {devices}: only {torch.cuda.device_count()} CUDA device(s) here")
    return kind


def launch(kind: str, devices: int = 1, nodes: int = 1) -> Fabric:
    """One process for one device, else one a device: started here, by torchrun or by Slurm."""
    strategy: Any = DDPStrategy() if devices * nodes > 1 else "auto"
    fabric = Fabric(accelerator=kind, devices=devices, num_nodes=nodes, strategy=strategy)
    fabric.launch()
    return fabric


def _finished(out: Path, content: dict[str, Any], config: Config) -> bool:
    status = read_json(out / RUN).get("status") if (out / RUN).is_file() else None
    return status == "finished" and (config.engine.seconds is not None or content["step"] >= config.engine.iterations)
