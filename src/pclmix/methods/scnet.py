"""SC-Net: DMPLS with scribbles extended over superpixels and class-wise contrast between the decoders."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Generator, Tensor

from pclmix.config import NonNegative, Positive, Section
from pclmix.data.batch import Batch
from pclmix.losses import planes
from pclmix.losses.contrast import at_stride, class_contrast, sample_classes
from pclmix.losses.pseudo import superpixels, walk_scribbles
from pclmix.losses.supervised import dice_loss
from pclmix.losses.unlabelled import ramp
from pclmix.methods.base import METHODS, Term, Terms
from pclmix.methods.dmpls import DMPLS, DMPLSParams, dropped, dual_terms

_STRIDE = 4  # of the contrast, whose 32 pixels a class need no full resolution


class SCNetParams(DMPLSParams):
    lambda_walk: NonNegative = Field(0.005, description="weight of the partial Dice to walked scribbles")
    lambda_contrast: NonNegative = Field(0.01, description="weight of the contrast at the end of its ramp")
    ramp: Annotated[float, Field(gt=0, le=1)] = Field(0.5, description="share of training over which it rises")
    features: Positive = Field(32, description="features of each class per step")


@METHODS.register("scnet")
class SCNet(DMPLS):
    summary: ClassVar[str] = "DMPLS, scribbles walked over superpixels, class-wise contrast"
    source: ClassVar[str] = (
        "Zhou et al. 2023, Superpixel-Guided Scribble Walking and Class-wise Contrastive Regularization"
    )
    Params: ClassVar[type[Section]] = SCNetParams

    @classmethod
    def precompute(
        cls, image: npt.NDArray[np.float32], scribble: npt.NDArray[np.int16]
    ) -> dict[str, npt.NDArray[np.int16]]:
        return {"walked": walk_scribbles(superpixels(image), scribble)}

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        params: SCNetParams = self.params
        features = self.net.features(batch.image)
        f1 = self.net.decoder.pixels(features)
        f2 = self.aux.pixels([dropped(f, params.dropout, generator) for f in features])
        main, aux = planes(self.net.decoder.head(f1)), planes(self.aux.head(f2))
        p1, p2 = main.softmax(1), aux.softmax(1)
        terms = dual_terms((main, aux), (p1, p2), batch.label, params.weight, generator)
        walked = batch.maps["walked"]
        terms["walk"] = Term((dice_loss(p1, walked) + dice_loss(p2, walked)) / 2, params.lambda_walk)
        # A pixel's class is that of the walked scribble, else that of the mean prediction.
        label = torch.where(walked >= 0, walked, (p1 + p2).detach().argmax(1))
        index, valid = sample_classes(at_stride(label, _STRIDE), self.task.classes, params.features, generator)
        contrast = class_contrast(at_stride(f1, _STRIDE), at_stride(f2, _STRIDE), index, valid)
        terms["contrast"] = Term(contrast, params.lambda_contrast * ramp(progress, params.ramp))
        return terms
