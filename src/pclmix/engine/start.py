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
from pclmix.engine.checkpoint import LAST, load_newest
from pclmix.engine.loop import train
from pclmix.engine.runlog import RUN
from pclmix.errors import PclmixError
from pclmix.files import read_json, refuse_existing


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
    """Train into `out` as the command line does; True when finished, False when interrupted."""
    console = console or Console(stderr=True)
    out = Path(out)
    content = load_newest(out) if resume else None
    if content is not None and recipe is None:
        config = override_config(content["config"], method, overrides)
    else:
        config = load_config(recipe or "fast", method, overrides)
    if not resume:
        refuse_existing(out)
    elif _finished(out, content, config):
        console.print(f"{out} is finished already: {_steps(content)} steps. Nothing to do.", highlight=False)
        return True
    data = Dataset.open(dataset)
    fabric = make_fabric(device, devices, nodes)
    finished = train(data, out, config, fold=fold, resume=content is not None, fabric=fabric, console=console)
    if fabric.is_global_zero:
        if finished:
            console.print(f"finished: {out / LAST}", highlight=False)
        else:
            console.print(f"stopped and saved. Go on with the same command and --resume ({out})", highlight=False)
    return finished


def make_fabric(device: str, devices: int = 1, nodes: int = 1) -> Fabric:
    """Launched: one process for one device, else one a device (started here, by torchrun or by Slurm)."""
    if device not in ("auto", "cpu", "cuda"):
        raise PclmixError(f"--device {device} is not known; use auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise PclmixError("--device cuda: no CUDA device can be used here; use --device cpu, or check the driver")
    if devices < 1 or nodes < 1:
        raise PclmixError(f"--devices {devices} --nodes {nodes}: both must be at least 1")
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and devices > torch.cuda.device_count():
        raise PclmixError(f"--devices {devices}: only {torch.cuda.device_count()} CUDA device(s) here")
    strategy: Any = DDPStrategy() if devices * nodes > 1 else "auto"
    fabric = Fabric(accelerator=kind, devices=devices, num_nodes=nodes, strategy=strategy)
    fabric.launch()
    return fabric


def _finished(out: Path, content: dict[str, Any] | None, config: Config) -> bool:
    if content is None:
        return False
    status = read_json(out / RUN).get("status") if (out / RUN).is_file() else None
    return status == "finished" and (config.engine.seconds is not None or content["step"] >= config.engine.iterations)


def _steps(content: dict[str, Any] | None) -> int:
    return int(content["step"]) if content is not None else 0
