"""Full supervision: the upper bound, trained on dense masks."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Generator, Tensor

from pclmix.data.batch import Batch
from pclmix.losses import planes
from pclmix.losses.supervised import dice_loss, partial_cross_entropy
from pclmix.methods.base import METHODS, Method, Term, Terms


@METHODS.register("full")
class Full(Method):
    summary: ClassVar[str] = "upper bound: cross-entropy and Dice on dense masks"
    source: ClassVar[str] = "Ronneberger et al. 2015, U-Net; Milletari et al. 2016, V-Net"
    needs: ClassVar[Literal["scribbles", "dense masks"]] = "dense masks"

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        logits = planes(self.net(batch.image))
        # Empty corners after a rotation are IGNORE.
        return {
            "ce": Term(partial_cross_entropy(logits, batch.label)),
            "dice": Term(dice_loss(logits.softmax(1), batch.label)),
        }
