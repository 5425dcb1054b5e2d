"""`train --from RUN`: start from the weights of another run, classes matched by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pclmix.config import Config
from pclmix.errors import PclmixError
from pclmix.labels import Labels
from pclmix.methods.base import Method, build_method
from pclmix.training.checkpoint import Checkpoint, open_model, trained_state

#: State of earlier steps, which belongs to the other run's data.
_OWN_DATA = ("queue.", "memory.")


@dataclass(frozen=True)
class Start:
    """The run to start from."""

    run: Path
    checkpoint: Checkpoint

    @property
    def net(self) -> str:
        return self.checkpoint.config.net

    def describe(self, labels: Labels) -> str:
        """A message that lists the matched classes."""
        known = [name for name in labels.foreground if name in self.checkpoint.labels.names]
        new = [name for name in labels.foreground if name not in known]
        parts = [f"taken over: {', '.join(known) or 'none'}", *([f"new: {', '.join(new)}"] if new else [])]
        return f"starting from {self.run}: {self.net}; classes {'; '.join(parts)}"


def open_start(run: Path, channels: tuple[str, ...]) -> Start:
    """The run to start from; refused if its number of channels differs."""
    checkpoint = open_model(run)
    if len(checkpoint.channels) != len(channels):
        raise PclmixError(
            f"--from {run}: its networks take {len(checkpoint.channels)} channel(s) "
            f"({', '.join(checkpoint.channels)}), this dataset has {len(channels)} ({', '.join(channels)})"
        )
    return Start(Path(run), checkpoint)


def load_start(method: Method, config: Config, start: Start, labels: Labels) -> None:
    """Copy the weights of `start` into `method`.

    Copies every tensor of the same name and shape. Of tensors with a class axis, copies the rows of classes with the
    same name; the backgrounds match. `net` must fit except for its classes.
    """
    given, own = trained_state(start.checkpoint), method.state_dict()
    rows = _same_names(start.checkpoint.labels, labels)
    axes = _class_axes(config, method)
    loaded = dict(own)
    for name, tensor in own.items():
        source, axis = given.get(name), axes.get(name)
        if source is None or name.startswith(_OWN_DATA):
            continue
        if axis is None and source.shape == tensor.shape:
            loaded[name] = source
        elif axis is not None and _fits_but(source, tensor, axis):
            loaded[name] = _with_rows(tensor, source, axis, rows)
        elif name.startswith("net."):
            raise PclmixError(
                f"--from {start.run}: {name} is {tuple(source.shape)} there and {tuple(tensor.shape)} here; "
                f"was it made by another version of {start.net}?"
            )
    method.load_state_dict(loaded)


def _same_names(before: Labels, now: Labels) -> dict[int, int]:
    """Class numbers here and there, by name."""
    rows = {k: before.names.index(name) for k, name in enumerate(now.names) if name in before.names}
    return {**rows, 0: 0}


def _class_axes(config: Config, method: Method) -> dict[str, int]:
    """The class axis of each tensor that has one, found by adding a class."""
    with torch.device("meta"):
        more = build_method(config, method.task.in_channels, method.task.classes + 1, method.task.slices).state_dict()
    found = {}
    for name, tensor in method.state_dict().items():
        changed = [axis for axis, (a, b) in enumerate(zip(tensor.shape, more[name].shape, strict=True)) if a != b]
        if len(changed) == 1:
            found[name] = changed[0]
    return found


def _fits_but(source: Tensor, tensor: Tensor, axis: int) -> bool:
    shapes = [[n for i, n in enumerate(t.shape) if i != axis] for t in (source, tensor)]
    return source.dim() == tensor.dim() and shapes[0] == shapes[1]


def _with_rows(tensor: Tensor, source: Tensor, axis: int, rows: Mapping[int, int]) -> Tensor:
    here, there = (torch.tensor(list(numbers)) for numbers in (rows.keys(), rows.values()))
    return tensor.clone().index_copy_(axis, here, source.index_select(axis, there).to(tensor.dtype))
