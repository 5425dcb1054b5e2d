"""The interface of a method: networks, state in buffers, and `step`, which returns named loss terms."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor, nn

from pclmix.config import Config, Section, build
from pclmix.data.batch import Batch
from pclmix.errors import PclmixError
from pclmix.nets.segmenter import Segmenter, build_segmenter
from pclmix.registry import Registry

METHODS: Registry[type[Method]] = Registry("method")


@dataclass(frozen=True)
class Term:
    """One named part of the loss: the trainer adds weight * value and logs the value."""

    value: Tensor
    weight: float | Tensor = 1.0


Terms = dict[str, Term]


@dataclass(frozen=True)
class Passes:
    """The passes of one step through `Method.forward`, in batches of B images; fractions are allowed.

    A network that is not trained, such as a teacher, counts as a pass without gradients.
    """

    trained: float = 1.0  #: with backward pass
    inferred: float = 0.0  #: forward only, without gradients


@dataclass(frozen=True)
class Task:
    """Properties of the data that determine the networks."""

    net: str
    in_channels: int
    classes: int
    size: tuple[int, int]
    slices: int = 0  #: N, slices in the training store, for methods with per-slice state


class Method(nn.Module):
    """A training method. `net` is the inference model; everything else is used in training only."""

    summary: ClassVar[str]  #: one line for `pclmix methods`
    source: ClassVar[str]  #: publication
    needs: ClassVar[Literal["scribbles", "dense masks"]] = "scribbles"
    Params: ClassVar[type[Section]] = Section
    #: The networks usable for prediction, the default first. All start from encoder.weights.
    inference_nets: ClassVar[tuple[str, ...]] = ("net",)
    needs_affine: ClassVar[bool] = False  #: undoes augmentation by `Batch.theta`, so only affine maps are allowed
    passes: ClassVar[Passes] = Passes()  #: the reference of benchmarks/methods.py

    net: Segmenter

    def __init__(self, task: Task, params: Any, net: Segmenter | None = None) -> None:
        """params: an instance of the method's Params. net: passed by methods that build it themselves."""
        super().__init__()
        self.task = task
        self.params = params
        self.net = net or build_segmenter(task.net, task.in_channels, task.classes)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """One training pass of images (B, C, H, W): the logits of every decoder, those of `net` first."""
        return (self.net(image),)

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        """Loss terms of one batch; `progress` is t/T as a 0-dim tensor, all randomness comes from `generator`."""
        raise NotImplementedError

    def update(self, progress: Tensor) -> None:
        """Update teachers and running means; called after the optimiser's step, without gradients."""

    @classmethod
    def precompute(
        cls, image: npt.NDArray[np.float32], scribble: npt.NDArray[np.int16]
    ) -> dict[str, npt.NDArray[np.int16]]:
        """The method's own label maps of one slice, made once when the store is prepared (none by default)."""
        return {}

    @classmethod
    def has_maps(cls) -> bool:
        return cls.precompute.__func__ is not Method.precompute.__func__  # type: ignore[attr-defined]


def find_method(name: str) -> type[Method]:
    """The class of a method by name; imports every module of this package, so that methods register."""
    load_all()
    return METHODS.find(name)


def load_all() -> None:
    package = importlib.import_module("pclmix.methods")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"pclmix.methods.{module.name}")


def build_params(method: type[Method], params: Mapping[str, Any]) -> Section:
    """Validate the method's own parameters; an error names the key and the known keys."""
    return build(method.Params, params, "params")


def require_fitting(config: Config) -> Section:
    """The parameters of the method of `config`; refuses settings that it cannot train with."""
    method = find_method(config.method)
    if method.needs_affine and config.augment.pinch > 0:
        raise PclmixError(
            f"augment.pinch={config.augment.pinch}: {config.method} remembers each slice and cannot undo a pinch; "
            "set augment.pinch=0"
        )
    if method.needs_affine and config.data.patch is not None:
        raise PclmixError(
            f"data.patch={list(config.data.patch)}: {config.method} remembers whole slices; set data.patch=null"
        )
    return build_params(method, config.params)


def build_method(config: Config, in_channels: int, classes: int, slices: int = 0) -> Method:
    """The method of a configuration with randomly initialised networks (seed first for repeatable ones)."""
    method = find_method(config.method)
    params = require_fitting(config)
    task = Task(config.net, in_channels, classes, config.data.size, slices)
    return method(task, params)


def sum_terms(terms: Terms) -> Tensor:
    """The loss, equation 1 for any method: the weighted sum of the terms, in float32."""
    values = [term.weight * term.value.float() for term in terms.values()]
    return torch.stack([v if isinstance(v, Tensor) else torch.as_tensor(v) for v in values]).sum()
