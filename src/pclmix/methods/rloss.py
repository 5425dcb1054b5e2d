"""Regularised loss: partial cross-entropy and a gated CRF, which makes similar nearby pixels agree."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Generator, Tensor

from pclmix.config import NonNegative, Positive, Section
from pclmix.data.batch import Batch
from pclmix.losses import planes
from pclmix.losses.supervised import partial_cross_entropy
from pclmix.losses.unlabelled import gated_crf
from pclmix.methods.base import METHODS, Method, Term, Terms


class RLossParams(Section):
    weight: NonNegative = Field(0.1, description="weight of the gated CRF")
    sigma_xy: Annotated[float, Field(gt=0)] = Field(6.0, description="width of the kernel in pixels")
    sigma_i: Annotated[float, Field(gt=0)] = Field(0.1, description="width of the kernel in intensity, of [0, 1]")
    radius: Positive = Field(5, description="largest distance of two pixels along rows and columns")


@METHODS.register("rloss")
class RLoss(Method):
    summary: ClassVar[str] = "cross-entropy on scribbles and a gated CRF"
    source: ClassVar[str] = "Tang et al. 2018, On Regularized Losses; Obukhov et al. 2019, Gated CRF Loss"
    Params: ClassVar[type[Section]] = RLossParams

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        params: RLossParams = self.params
        logits = planes(self.net(batch.image))
        p, image = logits.softmax(1), batch.image.float()
        energy = gated_crf(p, image, params.sigma_xy, params.sigma_i, params.radius)
        return {
            "pce": Term(partial_cross_entropy(logits, batch.label)),
            "crf": Term(energy, params.weight),
        }
