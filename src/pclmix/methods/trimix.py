"""TriMix: three networks, each trained on mixed images and pseudo labels of the other two."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Generator, Tensor

from pclmix.config import NonNegative, Section
from pclmix.data.batch import Batch
from pclmix.losses import planes
from pclmix.losses.supervised import partial_cross_entropy
from pclmix.methods.base import METHODS, Method, Passes, Task, Term, Terms
from pclmix.mixing import CutMix
from pclmix.nets.segmenter import build_segmenter


class TriMixParams(Section):
    area: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="share of the image that is cut and pasted")
    lambda_mix: NonNegative = Field(1.0, description="weight of the cross-entropy to mixed scribbles")
    lambda_pseudo: NonNegative = Field(1.0, description="weight of the cross-entropy to mixed pseudo labels")


@METHODS.register("trimix")
class TriMix(Method):
    summary: ClassVar[str] = "three networks, each trained on a CutMix of the other two"
    source: ClassVar[str] = "Zheng et al. 2022, TriMix: A General Framework for Medical Image Segmentation"
    Params: ClassVar[type[Section]] = TriMixParams
    inference_nets: ClassVar[tuple[str, ...]] = ("net", "net2", "net3")
    passes: ClassVar[Passes] = Passes(trained=2)

    def __init__(self, task: Task, params: TriMixParams) -> None:
        super().__init__(task, params)
        self.net2, self.net3 = (build_segmenter(task.net, task.in_channels, task.classes) for _ in range(2))
        self.mixer = CutMix(params.area)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return self.net(image), self.net2(image), self.net3(image)

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        params: TriMixParams = self.params
        device, count = batch.image.device, len(batch.image)
        orders = [torch.randperm(count, generator=generator, device=device) for _ in range(3)]
        x, y = [batch.image[order] for order in orders], [batch.label[order] for order in orders]
        # Net i learns from nets j and k. Mixed images do not depend on predictions, so one pass takes both halves.
        others = [(1, 2), (2, 0), (0, 1)]
        mixes = [self.mixer.draw(x[j], x[k], generator) for j, k in others]
        nets = (self.net, self.net2, self.net3)
        both = [
            planes(net(torch.cat([x[i], mixes[i].images(x[j], x[k])]))).chunk(2)
            for i, (net, (j, k)) in enumerate(zip(nets, others, strict=True))
        ]
        own, mixed = [b[0] for b in both], [b[1] for b in both]
        p = [logits.detach().softmax(1) for logits in own]
        scribbles = [mix.labels(y[j], y[k]) for mix, (j, k) in zip(mixes, others, strict=True)]
        pseudo = [mix.predictions(p[j], p[k]).argmax(1) for mix, (j, k) in zip(mixes, others, strict=True)]
        return {
            "pce": Term(_sum(own, y)),
            "mix": Term(_sum(mixed, scribbles), params.lambda_mix),
            "pseudo": Term(_sum(mixed, pseudo), params.lambda_pseudo),
        }


def _sum(logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    """The sum of the three networks' cross-entropies; they share no weights, so the gradients are independent."""
    return torch.stack([partial_cross_entropy(z, y) for z, y in zip(logits, labels, strict=True)]).sum()
