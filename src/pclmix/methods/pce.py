"""Partial cross-entropy: the baseline, which learns from scribbled pixels only."""

from __future__ import annotations

from typing import ClassVar

from torch import Generator, Tensor

from pclmix.data.batch import Batch
from pclmix.losses import planes
from pclmix.losses.supervised import partial_cross_entropy
from pclmix.methods.base import METHODS, Method, Term, Terms


@METHODS.register("pce")
class PCE(Method):
    summary: ClassVar[str] = "cross-entropy over scribbled pixels"
    source: ClassVar[str] = "Lin et al. 2016, ScribbleSup; Tang et al. 2018, Normalized Cut Loss"

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        return {"pce": Term(partial_cross_entropy(planes(self.net(batch.image)), batch.label))}
