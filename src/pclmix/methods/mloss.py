"""Mumford-Shah loss: partial cross-entropy and a penalty on classes of mixed intensity and on long borders."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Generator, Tensor

from pclmix.config import NonNegative, Section
from pclmix.data.batch import Batch
from pclmix.losses import planes
from pclmix.losses.supervised import partial_cross_entropy
from pclmix.losses.unlabelled import mumford_shah
from pclmix.methods.base import METHODS, Method, Term, Terms


class MLossParams(Section):
    weight: NonNegative = Field(1e-6, description="weight of the Mumford-Shah energy, a sum over the batch")


@METHODS.register("mloss")
class MLoss(Method):
    summary: ClassVar[str] = "cross-entropy on scribbles and the Mumford-Shah energy"
    source: ClassVar[str] = "Kim and Ye 2019, Mumford-Shah Loss Functional for Image Segmentation With Deep Learning"
    Params: ClassVar[type[Section]] = MLossParams

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        logits = planes(self.net(batch.image))
        energy = mumford_shah(logits.softmax(1), batch.image)
        return {
            "pce": Term(partial_cross_entropy(logits, batch.label)),
            "mumford_shah": Term(energy, self.params.weight),
        }
