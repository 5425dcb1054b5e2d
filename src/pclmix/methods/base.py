"""What a method is: networks, state in buffers, and `step`, which names its loss terms. The engine does the rest."""

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
    """One named part of the loss: the engine adds weight * value and logs the value."""

    value: Tensor
    weight: float | Tensor = 1.0


Terms = dict[str, Term]


@dataclass(frozen=True)
class Passes:
    """What one step sends through `Method.forward`, in batches of B images; fractions count too.

    A network that is not trained, such as a teacher, counts as the same network without its backward pass.
    """

    trained: float = 1.0  #: forward and backward
    inferred: float = 0.0  #: forward alone, without a gradient


@dataclass(frozen=True)
class Task:
    """What the data asks of the networks."""

    net: str
    in_channels: int
    classes: int
    size: tuple[int, int]
    slices: int = 0  #: N, slices in the training store, for methods that remember each one
    stride_in_1x1: bool = False


class Method(nn.Module):
    """One row of the table. `net` is the inference model; everything else a method has is for training only."""

    summary: ClassVar[str]  #: one line for `pclmix methods`
    source: ClassVar[str]  #: where it was published
    needs: ClassVar[Literal["scribbles", "dense masks"]] = "scribbles"
    Params: ClassVar[type[Section]] = Section
    #: The networks that can predict, each alone; the first is the method's answer. All start from encoder.weights.
    inference_nets: ClassVar[tuple[str, ...]] = ("net",)
    needs_affine: ClassVar[bool] = False  #: undoes augmentation by `Batch.theta`: only affine maps may be drawn
    passes: ClassVar[Passes] = Passes()  #: what benchmarks/methods.py measures a step against

    net: Segmenter

    def __init__(self, task: Task, params: Any, net: Segmenter | None = None) -> None:
        """`params` is an instance of the method's own Params; `net` is given by methods that build it themselves."""
        super().__init__()
        self.task = task
        self.params = params
        self.net = net or build_segmenter(task.net, task.in_channels, task.classes, task.stride_in_1x1)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """What training computes of images (B, C, H, W) in one pass: the logits of every decoder, `net`'s first."""
        return (self.net(image),)

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        """Loss terms of one batch; `progress` is t/T as a tensor without axes, randomness comes from `generator`."""
        raise NotImplementedError

    def update(self, progress: Tensor) -> None:
        """Called after the optimiser's step, without gradients: teachers, running means."""

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
    """The class of a method by name; every file of this package is imported, so that each registers itself."""
    load_all()
    return METHODS.find(name)


def load_all() -> None:
    package = importlib.import_module("pclmix.methods")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"pclmix.methods.{module.name}")


def build_params(method: type[Method], params: Mapping[str, Any]) -> Section:
    """The method's own parameters, checked; the message names the key and what is known."""
    return build(method.Params, params, "params")


def require_fitting(config: Config) -> Section:
    """The parameters of the method of `config`, after refusing settings that it cannot train with."""
    method = find_method(config.method)
    if method.needs_affine and config.augment.pinch > 0:
        raise PclmixError(
            f"augment.pinch={config.augment.pinch}: {config.method} remembers each slice and cannot undo a pinch; "
            "set augment.pinch=0"
        )
    return build_params(method, config.params)


def build_method(config: Config, in_channels: int, classes: int, slices: int = 0) -> Method:
    """The method of a configuration with randomly initialised networks (seed first for repeatable ones)."""
    method = find_method(config.method)
    params = require_fitting(config)
    task = Task(config.net, in_channels, classes, config.data.size, slices, config.encoder.stride_in_1x1)
    return method(task, params)


def sum_terms(terms: Terms) -> Tensor:
    """Equation 1 for any method: the weighted sum of the terms, in float32."""
    values = [term.weight * term.value.float() for term in terms.values()]
    return torch.stack([v if isinstance(v, Tensor) else torch.as_tensor(v) for v in values]).sum()
