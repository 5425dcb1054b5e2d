"""Checkpoints: written whole or not at all, verified on reading, the one before kept as a fallback.

Content (all of it loads with weights_only): `format`, `version`, `config`, `labels`, `channels`, `spacing`, `run`,
`step`, `seconds`, `method` (all weights and buffers), `average` (the weight average), `optimizer`, `random`.
"""

from __future__ import annotations

import logging
import os
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pclmix.errors import PclmixError
from pclmix.files import atomic_path
from pclmix.labels import Labels
from pclmix.nets.segmenter import Segmenter, build_segmenter

FORMAT = 1
LAST, PREVIOUS, SNAPSHOTS = "last.ckpt", "previous.ckpt", "snapshots"
_KEYS = ("version", "config", "labels", "channels", "step", "method")
log = logging.getLogger(__name__)


def save_checkpoint(run: Path, content: dict[str, Any]) -> None:
    """Write RUN/last.ckpt; what was there before becomes RUN/previous.ckpt. At every moment one of them is whole."""
    last = Path(run) / LAST
    try:
        with atomic_path(last) as temporary:
            torch.save({"format": FORMAT, **content}, temporary)
            if last.exists():
                spare = last.with_name(f".{PREVIOUS}-link")
                spare.unlink(missing_ok=True)
                try:
                    os.link(last, spare)
                except OSError:  # a filesystem without hard links
                    shutil.copyfile(last, spare)
                os.replace(spare, last.with_name(PREVIOUS))
    except RuntimeError as error:  # torch's writer reports a full disk so
        raise _full(last, error) from error


def _full(path: Path, error: RuntimeError) -> PclmixError:
    return PclmixError(
        f"cannot write {path}: {error}; is the disk full? Then free some space. "
        "The checkpoint before, if there is one, is untouched"
    )


def load_checkpoint(path: Path, *, map_location: str = "cpu", lazy: bool = False) -> dict[str, Any]:
    """Read one checkpoint after verifying every byte of it; `lazy` maps the file, for who needs a part of it."""
    path = Path(path)
    if not path.is_file():
        raise PclmixError(f"{path} does not exist; a checkpoint or a run folder is needed")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise PclmixError(f"{path} is damaged (in {damaged}); use the checkpoint before it or train again")
        content = torch.load(path, map_location=map_location, weights_only=True, mmap=lazy)
    except PclmixError:
        raise
    except Exception as error:  # a damaged archive surfaces as many types; all of them mean the same to a user
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PclmixError(
            f"{path} is not a readable checkpoint ({reason[:200]}); a run folder or its last.ckpt is needed"
        ) from error
    if not isinstance(content, dict) or any(key not in content for key in _KEYS):
        raise PclmixError(f"{path} is not a checkpoint of pclmix")
    if content.get("format") != FORMAT:
        raise PclmixError(
            f"{path} was written by pclmix {content['version']} in checkpoint format {content.get('format')}; "
            f"this version reads format {FORMAT}: install that version or train again"
        )
    return content


def load_newest(run: Path, *, lazy: bool = False) -> dict[str, Any] | None:
    """The newest checkpoint of a run that can be read, falling back with a warning; None where there is none."""
    paths = [p for p in (Path(run) / LAST, Path(run) / PREVIOUS) if p.exists()]
    problems = []
    for path in paths:
        try:
            return load_checkpoint(path, lazy=lazy)
        except PclmixError as error:
            problems.append(str(error))
            if path != paths[-1]:
                log.warning("%s; trying the checkpoint before it", error)
    if problems:
        raise PclmixError(f"no checkpoint of {run} can be read: {problems[0]}; start again in another folder")
    return None


def find_checkpoint(model: Path) -> Path:
    """MODEL as a user gives it: a run folder or a checkpoint file."""
    model = Path(model)
    if model.is_dir():
        for name in (LAST, PREVIOUS):
            if (model / name).is_file():
                return model / name
        raise PclmixError(f"{model} holds no checkpoint ({LAST}); is it a run folder of `pclmix train`?")
    return model


def open_model(model: Path) -> dict[str, Any]:
    """The checkpoint behind MODEL, mapped; of a run folder the newest one that can be read."""
    path = find_checkpoint(model)
    content = load_newest(path.parent, lazy=True) if Path(model).is_dir() else None
    return content if content is not None else load_checkpoint(path, lazy=True)


def save_snapshot(run: Path, content: dict[str, Any], nets: Sequence[str]) -> Path:
    """Write RUN/snapshots/step-N.ckpt: the weights to predict with at this step and nothing to go on from."""
    prefixes = tuple(f"{net}." for net in nets)
    state = {k: v for k, v in trained_state(content).items() if k.startswith(prefixes)}
    slim = {k: v for k, v in content.items() if k not in ("method", "average", "optimizer", "random")}
    path = Path(run) / SNAPSHOTS / f"step-{content['step']:06d}.ckpt"
    try:
        with atomic_path(path) as temporary:
            torch.save({"format": FORMAT, **slim, "method": state}, temporary)
    except RuntimeError as error:
        raise _full(path, error) from error
    return path


def trained_state(content: dict[str, Any], *, last: bool = False) -> dict[str, Tensor]:
    """The weights to predict with: the average where the run kept one, unless the `last` are asked for."""
    if last and "average" not in content and content["config"]["engine"]["ema"] > 0:
        raise PclmixError("a snapshot holds averaged weights alone; ask the run itself for the last ones")
    state: dict[str, Tensor] = dict(content["method"])
    average = None if last else content.get("average")
    if average and average["steps"] > 0:
        scale = 1.0 / (1.0 - float(content["config"]["engine"]["ema"]) ** int(average["steps"]))
        state.update({name: tensor * scale for name, tensor in average["sum"].items()})
    return state


def inference_state(content: dict[str, Any], net: str = "net", *, last: bool = False) -> dict[str, Tensor]:
    """Weights of one inference network alone, from the average where there is one, unless the `last` are asked for."""
    state, prefix = trained_state(content, last=last), f"{net}."
    return with_offset({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}, content)


def with_offset(state: dict[str, Tensor], content: dict[str, Any]) -> dict[str, Tensor]:
    """A decoder's weights with the `offset` of the configuration in the bias of its head."""
    offset = content["config"].get("offset") or {}  # runs from before there was one have none
    if not offset:
        return state
    (head,) = (name for name in state if name.endswith("head.bias"))
    bias = state[head].clone()
    labels = Labels(tuple(content["labels"]["names"]), content["labels"]["ignore"])
    for name, value in offset.items():
        bias[labels.index(name, f"offset.{name}")] += value
    return {**state, head: bias}


def build_net(content: dict[str, Any], name: str = "net", *, last: bool = False) -> Segmenter:
    """An inference network of a checkpoint: encoder and CNN decoder, ready to predict. No transformer is built."""
    config, classes = content["config"], len(content["labels"]["names"])
    net = build_segmenter(config["net"], len(content["channels"]), classes, config["encoder"]["stride_in_1x1"])
    try:
        net.load_state_dict(inference_state(content, name, last=last))
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise PclmixError(
            f"the checkpoint's weights do not fit what it says of itself ({config['net']}, {classes} classes, "
            f"{len(content['channels'])} channels): {reason}; was it changed by hand? Train again or use another"
        ) from error
    return net.eval()
