"""Entropy minimisation: partial cross-entropy, and every pixel should be sure."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Generator, Tensor

from pclmix.config import NonNegative, Section
from pclmix.data.batch import Batch
from pclmix.losses.entropy_min import normalised_entropy
from pclmix.losses.partial_ce import partial_cross_entropy
from pclmix.losses.precision import planes
from pclmix.methods.base import METHODS, Method, Term, Terms


class EMParams(Section):
    weight: NonNegative = Field(0.1, description="weight of the entropy")


@METHODS.register("em")
class EM(Method):
    summary: ClassVar[str] = "cross-entropy on scribbles and small entropy everywhere"
    source: ClassVar[str] = "Grandvalet and Bengio 2004, Semi-supervised Learning by Entropy Minimization"
    Params: ClassVar[type[Section]] = EMParams

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        logits = planes(self.net(batch.image))
        entropy = normalised_entropy(logits.softmax(1))
        return {
            "pce": Term(partial_cross_entropy(logits, batch.label)),
            "entropy": Term(entropy, self.params.weight),
        }
