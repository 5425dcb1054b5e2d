"""Entropy minimisation: partial cross-entropy and a penalty on the entropy of every pixel."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field
from torch import Generator, Tensor

from pclmix.config import NonNegative, Section
from pclmix.data.batch import Batch
from pclmix.losses import planes
from pclmix.losses.supervised import partial_cross_entropy
from pclmix.losses.unlabelled import entropy
from pclmix.methods.base import METHODS, Method, Term, Terms


class EMParams(Section):
    weight: NonNegative = Field(0.1, description="weight of the entropy")


@METHODS.register("em")
class EM(Method):
    summary: ClassVar[str] = "cross-entropy on scribbles and low entropy everywhere"
    source: ClassVar[str] = "Grandvalet and Bengio 2004, Semi-supervised Learning by Entropy Minimization"
    Params: ClassVar[type[Section]] = EMParams

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        logits = planes(self.net(batch.image))
        return {
            "pce": Term(partial_cross_entropy(logits, batch.label)),
            "entropy": Term(normalised_entropy(logits.softmax(1)), self.params.weight),
        }


def normalised_entropy(p: Tensor) -> Tensor:
    """mean over pixels of -sum_k p_k log p_k / log K, in [0, 1]. p: (B, K, H, W)."""
    return entropy(p).mean() / math.log(p.shape[1])
