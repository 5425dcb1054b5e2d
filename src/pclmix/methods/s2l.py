"""Scribble2Label: pixels whose running mean prediction is confident become labels."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Generator, Tensor

from pclmix.config import NonNegative, Positive, Section, Share
from pclmix.data.batch import Batch
from pclmix.errors import PclmixError
from pclmix.labels import IGNORE
from pclmix.losses import planes
from pclmix.losses.pseudo import RunningMean, confident_class, identity
from pclmix.losses.supervised import partial_cross_entropy
from pclmix.methods.base import METHODS, Method, Passes, Task, Term, Terms


class S2LParams(Section):
    weight: NonNegative = Field(0.5, description="weight of the cross-entropy on pseudo labels")
    alpha: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="share of the newest prediction in the mean")
    threshold: Share = Field(0.8, description="a pixel is a pseudo label where its mean exceeds this")
    start: Share = Field(0.1, description="share of training with scribbles alone")
    stride: Positive = Field(2, description="the mean is kept at the image's size divided by this")


@METHODS.register("s2l")
class S2L(Method):
    summary: ClassVar[str] = "pseudo labels where the running mean prediction of a slice is confident"
    source: ClassVar[str] = "Lee and Jeong 2020, Scribble2Label"
    Params: ClassVar[type[Section]] = S2LParams
    needs_affine: ClassVar[bool] = True
    passes: ClassVar[Passes] = Passes(trained=1, inferred=1)

    def __init__(self, task: Task, params: S2LParams) -> None:
        super().__init__(task, params)
        if any(side % params.stride for side in task.size):
            raise PclmixError(f"params.stride={params.stride} does not divide data.size={list(task.size)}")
        self.memory = RunningMean(task.slices, task.classes, task.size, params.stride)

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        params: S2LParams = self.params
        theta = identity(len(batch.image), batch.image) if batch.theta is None else batch.theta
        # A slice is updated each time it is drawn: with 1,500 slices in batches of 12, every 125 steps.
        self.memory.update(batch.index, self._predict(batch.image), theta, params.alpha)
        pseudo = confident_class(self.memory.read(batch.index, theta), params.threshold)
        pseudo = pseudo.masked_fill(batch.label >= 0, IGNORE)  # scribbles have their own term
        logits = planes(self.net(batch.image))
        return {
            "pce": Term(partial_cross_entropy(logits, batch.label)),
            "pseudo": Term(partial_cross_entropy(logits, pseudo), params.weight * (progress >= params.start)),
        }

    @torch.no_grad()
    def _predict(self, image: Tensor) -> Tensor:
        """Probabilities as at test time: without dropout, with the running statistics of BatchNorm."""
        training = self.net.training
        self.net.eval()
        p = planes(self.net(image)).softmax(1)
        self.net.train(training)
        return p
