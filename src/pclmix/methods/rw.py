"""Random walker: dense pseudo labels from each slice's scribbles, computed once, then full supervision."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import Generator, Tensor

from pclmix.data.batch import Batch
from pclmix.losses import planes
from pclmix.losses.pseudo import random_walker_labels
from pclmix.losses.supervised import dice_loss, partial_cross_entropy
from pclmix.methods.base import METHODS, Method, Term, Terms


@METHODS.register("rw")
class RandomWalker(Method):
    summary: ClassVar[str] = "dense pseudo labels by a random walker from the scribbles"
    source: ClassVar[str] = "Grady 2006, Random Walks for Image Segmentation"

    @classmethod
    def precompute(
        cls, image: npt.NDArray[np.float32], scribble: npt.NDArray[np.int16]
    ) -> dict[str, npt.NDArray[np.int16]]:
        return {"walker": random_walker_labels(image, scribble)}

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        logits, label = planes(self.net(batch.image)), batch.maps["walker"]
        return {
            "ce": Term(partial_cross_entropy(logits, label), 0.5),
            "dice": Term(dice_loss(logits.softmax(1), label), 0.5),
        }
