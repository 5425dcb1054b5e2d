"""From a command to a running loop: the configuration, the devices, a fresh or resumed run folder."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pclmix.config import Config, load_config, override_config
from pclmix.data.dataset import Dataset
from pclmix.data.hull import hull_shares
from pclmix.device import device_kind
from pclmix.distributed import LostProcessError, Process, watch_processes
from pclmix.engine.checkpoint import LAST, load_newest
from pclmix.engine.claim import claimed
from pclmix.engine.loop import train
from pclmix.engine.prepare import Prepared, prepare
from pclmix.engine.runlog import RUN, read_config
from pclmix.engine.state import require_same, require_same_cases
from pclmix.engine.step import DivergedError
from pclmix.errors import PclmixError, require_names
from pclmix.files import read_json, refuse_existing, require_writable
from pclmix.methods.base import require_fitting
from pclmix.nets.segmenter import build_segmenter, check_side


def run_training(
    dataset: Path,
    out: Path,
    *,
    method: str | None = None,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    fold: int | None = None,
    cases: Sequence[str] | None = None,
    resume: bool = False,
    expected: bool = True,
    device: str = "auto",
    devices: int = 1,
    nodes: int = 1,
    console: Console | None = None,
) -> bool:
    """Train into `out` as the command line does; True when finished, False when interrupted.

    `cases`, where given, are the only ones trained on; a resume has to be given them again.
    A resume repeats the run's own settings where none are given, and refuses others; where there is no run it begins
    one, and says so if one was `expected`. With many processes the answer
    is the first one's; the others return True, since whoever launched them takes anything else for a crash.
    """
    console = console or Console(stderr=True)
    out = Path(out)
    require_kinds(overrides, fold, cases)
    with claimed(out):
        if out.is_file():
            raise PclmixError(f"{out} is a file where a run folder is to be; choose another name")
        content = load_newest(out) if resume else None
        begun = content["config"] if content is not None else read_config(out) if resume else None
        if begun is not None and recipe is None:
            config = override_config(begun, method, overrides)
            fold = _fold_of(out, content) if fold is None else fold
        else:
            config = load_config(recipe or "fast", method, overrides)
        params = require_fitting(config)
        config = config.model_copy(update={"params": params.model_dump(mode="json")})
        if not resume:
            refuse_existing(out, way_out="go on with --resume, choose another name or remove it first")
        require_writable(out)
        devices, nodes = count_processes(devices, nodes)
        kind = choose_device(device, devices, nodes)
        data = Dataset.open(dataset)
        require_fit(config, len(data.channels), data.labels.count, devices * nodes)
        hull_shares(config.data, data.labels)  # refuses names of no structure
        for name in config.offset:
            data.labels.index(name, f"offset.{name}")
        if resume and expected and begun is None:
            where = "all cases" if fold is None else f"fold {fold}"
            _say(console, f"{out} holds no run: beginning one, {config.method} with recipe {config.recipe} on {where}.")
        if content is not None:
            fold = _fold_of(out, content) if fold is None else fold
            require_same(content, config, data, fold, out)
            if _finished(out, content, config):
                _say(console, f"{out} is finished already: {content['step']} steps. Nothing to do.")
                return True
        prepared = prepare(data, config, fold, console, cases)
        if content is not None:
            require_same_cases(content, prepared.cases, data, out)
        again = ["pclmix", "train", str(dataset), "--out", str(out), "--resume"]
        again += ["--device", device] if device != "auto" else []
        again += ["--devices", str(devices)] if devices > 1 else []
        again += ["--nodes", str(nodes)] if nodes > 1 else []
        process = launch(kind, devices, nodes)
        return _train(data, prepared, out, config, content, process, console, shlex.join(again))


def _train(
    data: Dataset,
    prepared: Prepared,
    out: Path,
    config: Config,
    content: dict[str, Any] | None,
    process: Process,
    console: Console,
    again: str,
) -> bool:
    """The loop, and in words how it ended; `again` is the command that goes on."""
    try:
        with watch_processes():
            finished = train(data, prepared, out, config, content, process, console)
    except DivergedError:
        if process.first:
            raise
        return True
    except LostProcessError as error:
        if not error.spokesman:
            raise SystemExit(2) from error
        kept = f"the last checkpoint is {out / LAST}" if (out / LAST).is_file() else "there is no checkpoint yet"
        raise PclmixError(
            f"{error}, killed (too little memory?) or with a message of its own; {kept}. Go on with: {again}"
        ) from error
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(error):
            raise
        place = process.device.type
        raise PclmixError(
            f"out of memory on {place} with engine.batch={config.engine.batch} and data.size={list(config.data.size)}; "
            f"make one of them smaller, or choose a smaller net than {config.net}"
        ) from error
    if not process.first:
        return True
    _say(console, f"finished: {out / LAST}" if finished else f"stopped and saved. Go on with: {again}")
    return finished


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def require_kinds(overrides: Sequence[str], fold: int | None, cases: Sequence[str] | None) -> None:
    """What a shell cannot get wrong and Python can."""
    for word in overrides:
        if not isinstance(word, str):
            raise PclmixError(f'{word!r}: settings are words of their own, such as "optim.lr=0.01", "seed=1"')
    if fold is not None and (not isinstance(fold, int) or isinstance(fold, bool)):
        raise PclmixError(f"fold={fold!r}: a number from 1 on is needed, or None for all cases")
    require_names("cases", cases)


def require_fit(config: Config, in_channels: int, classes: int, world: int) -> None:
    """Refuse a recipe whose batch or image size cannot work, before anything is prepared or launched."""
    batch = config.engine.batch
    if batch % world:
        raise PclmixError(f"engine.batch={batch} cannot be split over {world} devices; choose a multiple of {world}")
    if batch // world < 2:
        raise PclmixError(
            f"engine.batch={batch} on {world} device(s) leaves {batch // world} image a step and device: "
            f"BatchNorm needs two; set engine.batch={2 * world} or more"
        )
    with torch.device("meta"):  # the shapes of the network, without its weights
        net = build_segmenter(config.net, in_channels, classes, config.encoder.stride_in_1x1)
    check_side(*config.data.size, net.multiple)


def count_processes(devices: int, nodes: int) -> tuple[int, int]:
    """Devices and nodes; torchrun knows both itself, so there they may be left out."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return devices, nodes
    local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    if (devices, nodes) not in ((1, 1), (local, world // local)):
        raise PclmixError(
            f"--devices {devices} --nodes {nodes}: torchrun started {local} process(es) on each of {world // local} "
            "node(s); leave both out or give the same"
        )
    return local, world // local


def choose_device(device: str, devices: int = 1, nodes: int = 1) -> str:
    """cpu or cuda, refused with the way out where it cannot be had."""
    kind = device_kind(device)
    if devices < 1 or nodes < 1:
        raise PclmixError(f"--devices {devices} --nodes {nodes}: both must be at least 1")
    if kind == "cuda" and devices > torch.cuda.device_count():
        raise PclmixError(f"--devices {devices}: only {torch.cuda.device_count()} CUDA device(s) here")
    return kind


def launch(kind: str, devices: int = 1, nodes: int = 1) -> Process:
    """One process for one device, else one a device: started here, by torchrun or by Slurm."""
    if devices * nodes == 1:
        return Process(torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # one that waits for the others must end at once
    # Imported here: it imports torch's compiler, too, which takes longer than all else before the first step.
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator=kind, devices=devices, num_nodes=nodes, strategy=DDPStrategy())
    fabric.launch()
    return Process(fabric.device, fabric.global_rank, fabric.world_size)


def _fold_of(out: Path, content: dict[str, Any] | None) -> int | None:
    """The fold a run was begun with, by its checkpoint or, before the first one, by run.json."""
    known = content["run"] if content is not None else read_json(out / RUN) if (out / RUN).is_file() else {}
    fold: int | None = known.get("fold")
    return fold


def _finished(out: Path, content: dict[str, Any], config: Config) -> bool:
    status = read_json(out / RUN).get("status") if (out / RUN).is_file() else None
    return status == "finished" and (config.engine.seconds is not None or content["step"] >= config.engine.iterations)
