"""Checkpoints: written atomically, validated on loading, with the previous one as a fallback.

On disk a checkpoint is a plain dictionary of numbers, text and tensors, so that it loads with weights_only.
"""

from __future__ import annotations

import logging
import os
import shutil
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, Strict, StrictStr, ValidationError
from torch import Tensor, nn

from pclmix.config import Config
from pclmix.errors import PclmixError, load_failure, without_warnings
from pclmix.io.files import atomic_path
from pclmix.labels import Labels
from pclmix.nets.segmenter import Segmenter, build_segmenter

FORMAT = 2
LAST, PREVIOUS, SNAPSHOTS = "last.ckpt", "previous.ckpt", "snapshots"
Count = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
Positive = Annotated[FiniteFloat, Field(gt=0)]
Millimetres = tuple[Positive, Positive, Positive]  #: along Z, H, W
M = TypeVar("M", bound=nn.Module)
log = logging.getLogger(__name__)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Spacings(_Part):
    """Spacing of the training images."""

    median: Millimetres
    min: Millimetres
    max: Millimetres


class TrainedOn(_Part):
    """The data of a run: dataset, fold left out (None: no fold) and the training cases in order."""

    dataset: StrictStr
    fold: Count | None
    cases: tuple[StrictStr, ...]


class Round(_Part):
    """Position in a run of several rounds; other runs have one round."""

    number: Annotated[int, Strict(), Field(ge=1)] = 1
    begins: Count = 0  #: steps of the rounds before
    since: Annotated[FiniteFloat, Field(ge=0)] = (
        0.0  #: seconds before its first step; kept where there is a time budget
    )
    labels: StrictStr = ""  #: digest of the labels in RUN/roundN.npz; empty for the first round


class Average(_Part):
    """The weight average: uncorrected sum and number of steps."""

    steps: Count
    sum: dict[str, Tensor]

    def weights(self, decay: float) -> dict[str, Tensor]:
        """The bias-corrected average by name; empty before the first step."""
        if self.steps == 0:
            return {}
        scale = 1.0 / (1.0 - decay**self.steps)
        return {name: tensor * scale for name, tensor in self.sum.items()}


class Checkpoint(_Part):
    """Everything needed to predict with a run and to continue it. A snapshot has only what prediction needs."""

    version: StrictStr  #: version of pclmix that wrote it
    config: Config
    labels: Labels
    channels: Annotated[tuple[StrictStr, ...], Field(min_length=1)]
    spacing: Spacings
    run: TrainedOn
    step: Count
    seconds: Annotated[FiniteFloat, Field(ge=0)]
    round: Round = Round()
    method: dict[str, Tensor]  #: all weights and buffers by name
    average: Average | None = None
    optimizer: dict[str, Any] | None = None
    random: tuple[dict[str, Tensor], ...] | None = None  #: states of the random generators, by rank

    @property
    def is_snapshot(self) -> bool:
        return self.optimizer is None

    @property
    def settings(self) -> Config:
        """The settings of the last round, with which the weights were trained."""
        return self.config.of_round(self.round.number)

    def to_plain(self) -> dict[str, Any]:
        """The dictionary that is saved."""
        return {
            "format": FORMAT,
            "version": self.version,
            "config": self.config.model_dump(mode="json"),
            "labels": {**asdict(self.labels), "names": list(self.labels.names)},
            "channels": list(self.channels),
            "spacing": self.spacing.model_dump(mode="json"),
            "run": self.run.model_dump(mode="json"),
            "step": self.step,
            "seconds": self.seconds,
            "round": self.round.model_dump(mode="json"),
            "method": self.method,
            "average": None if self.average is None else {"steps": self.average.steps, "sum": self.average.sum},
            "optimizer": self.optimizer,
            "random": None if self.random is None else list(self.random),
        }

    @classmethod
    def from_plain(cls, content: Any, path: Path) -> Checkpoint:
        """Validate a dictionary loaded from `path`; the error names the file and the key."""
        if not isinstance(content, dict) or "format" not in content:
            raise PclmixError(f"{path} is not a checkpoint of pclmix: it has no key 'format'")
        found = content["format"]
        if type(found) is not int:
            raise PclmixError(f"{path}: key 'format' is not a number; train again or use another")
        if found != FORMAT:
            raise PclmixError(
                f"{path} was written by pclmix {str(content.get('version'))[:40]} in checkpoint format {found}; "
                f"this version reads format {FORMAT}: install that version or train again"
            )
        try:
            checkpoint = cls.model_validate({key: value for key, value in content.items() if key != "format"})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise PclmixError(f"{path}: key '{key}': {first['msg'].lower()}; train again or use another") from None
        except PclmixError as error:  # of the labels
            raise PclmixError(f"{path}: key 'labels': {error}") from None
        if not content["config"]:
            raise PclmixError(f"{path}: key 'config' is empty; train again or use another")
        average = () if checkpoint.average is None else checkpoint.average.sum.items()
        _require_usable(path, "method", checkpoint.method.items())
        _require_usable(path, "average.sum", average)
        return checkpoint


def _require_usable(path: Path, key: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
            raise PclmixError(f"{path}: key '{key}.{name}' is no array of real numbers; train again or use another")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise PclmixError(f"{path}: key '{key}.{name}' holds NaN or infinity; train again or use another")


def save_checkpoint(run: Path, checkpoint: Checkpoint) -> None:
    """Write RUN/last.ckpt; the previous one becomes RUN/previous.ckpt. One of them is always complete."""
    last = Path(run) / LAST
    try:
        with atomic_path(last) as temporary:
            torch.save(checkpoint.to_plain(), temporary)
            if last.exists():
                spare = last.with_name(f".{PREVIOUS}-link")
                spare.unlink(missing_ok=True)
                try:
                    os.link(last, spare)
                except OSError:  # a filesystem without hard links
                    shutil.copyfile(last, spare)
                os.replace(spare, last.with_name(PREVIOUS))
                # Killed just before `last` was replaced, both names are one file; then rename(2) leaves the link.
                spare.unlink(missing_ok=True)
    except RuntimeError as error:  # torch reports a full disk this way
        raise _full(last, error) from error


def _full(path: Path, error: RuntimeError) -> PclmixError:
    return PclmixError(
        f"cannot write {path}: {error}; is the disk full? Then free some space. "
        "The checkpoint before, if there is one, is untouched"
    )


def load_checkpoint(path: Path, *, map_location: str = "cpu", lazy: bool = False) -> Checkpoint:
    """Read one checkpoint after verifying every byte of it; `lazy` maps the tensors into memory."""
    path = Path(path)
    if not path.is_file():
        raise PclmixError(f"{path} does not exist; give a run folder or a checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise PclmixError(f"{path} is damaged (in {damaged}); use the checkpoint before it or train again")
        with without_warnings():
            content = torch.load(path, map_location=map_location, weights_only=True, mmap=lazy)
    except PclmixError:
        raise
    except Exception as error:  # damaged archives raise many types of errors
        raise PclmixError(
            f"{path} is not a readable checkpoint ({load_failure(error)}); a run folder or its last.ckpt is needed"
        ) from error
    return Checkpoint.from_plain(content, path)


def load_newest(run: Path, *, lazy: bool = False) -> Checkpoint | None:
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


def open_model(model: Path) -> Checkpoint:
    """The checkpoint behind MODEL, mapped; of a run folder the newest one that can be read."""
    path = find_checkpoint(model)
    content = load_newest(path.parent, lazy=True) if Path(model).is_dir() else None
    return content if content is not None else load_checkpoint(path, lazy=True)


def save_snapshot(run: Path, checkpoint: Checkpoint, nets: Sequence[str]) -> Path:
    """Write RUN/snapshots/step-N.ckpt: the weights for prediction, without the state to resume."""
    prefixes = tuple(f"{net}." for net in nets)
    state = {k: v for k, v in trained_state(checkpoint).items() if k.startswith(prefixes)}
    slim = checkpoint.model_copy(update={"method": state, "average": None, "optimizer": None, "random": None})
    path = Path(run) / SNAPSHOTS / f"step-{checkpoint.step:06d}.ckpt"
    try:
        with atomic_path(path) as temporary:
            torch.save(slim.to_plain(), temporary)
    except RuntimeError as error:
        raise _full(path, error) from error
    return path


def trained_state(checkpoint: Checkpoint, *, last: bool = False) -> dict[str, Tensor]:
    """The weights for prediction: the average if there is one, unless `last`."""
    decay = checkpoint.config.engine.ema
    average = {} if last or checkpoint.average is None else checkpoint.average.weights(decay)
    return {**checkpoint.method, **average}


def inference_state(checkpoint: Checkpoint, net: str = "net", *, last: bool = False) -> dict[str, Tensor]:
    """Weights of one inference network: the average if there is one, unless `last`."""
    state, prefix = trained_state(checkpoint, last=last), f"{net}."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def build_net(checkpoint: Checkpoint, name: str = "net", *, last: bool = False) -> Segmenter:
    """An inference network of a checkpoint: encoder and CNN decoder with their weights."""
    config, classes, channels = checkpoint.config, checkpoint.labels.count, len(checkpoint.channels)
    net = build_segmenter(config.net, channels, classes)
    return load_weights(net, inference_state(checkpoint, name, last=last), checkpoint)


def load_weights(net: M, state: dict[str, Tensor], checkpoint: Checkpoint) -> M:
    """Load the weights of a checkpoint into a matching network, in evaluation mode."""
    kinds = {name: tensor.is_floating_point() for name, tensor in net.state_dict().items()}
    try:
        for name, tensor in state.items():
            if kinds.get(name, False) and not tensor.is_floating_point():
                raise RuntimeError(f"{name} is of type {tensor.dtype}".replace("torch.", ""))  # would be converted
        net.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise PclmixError(
            f"the checkpoint's weights do not fit its description ({checkpoint.config.net}, "
            f"{checkpoint.labels.count} classes, {len(checkpoint.channels)} channels): {reason}; was it changed by "
            "hand? Train again or use another"
        ) from error
    return net.eval()
