"""CycleMix: what matters of one image pasted into another, occlusion, and consistency at large and in small."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Generator, Tensor

from pclmix.config import NonNegative, Positive, Section
from pclmix.data.batch import Batch
from pclmix.labels import IGNORE
from pclmix.losses.consistency import negative_cosine
from pclmix.losses.largest_component import without_islands
from pclmix.losses.partial_ce import partial_cross_entropy
from pclmix.losses.precision import planes
from pclmix.methods.base import METHODS, Method, Passes, Task, Term, Terms
from pclmix.mixing import Saliency, SaliencyMix, squares


class CycleMixParams(Section):
    area: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="share of the image that is pasted")
    saliency: Literal["gradient", "contrast"] = Field(
        "gradient", description="what matters: the loss's gradient at the image, or its local contrast"
    )
    occlusion: Positive = Field(32, description="side in pixels of the square emptied in a mixed image")
    lambda_mix: NonNegative = Field(0.1, description="weight of mix invariance")
    lambda_component: NonNegative = Field(0.1, description="weight of agreement with the largest components")


@METHODS.register("cyclemix")
class CycleMix(Method):
    summary: ClassVar[str] = "saliency-guided mix, occlusion, mix invariance, largest components"
    source: ClassVar[str] = "Zhang and Zhuang 2022, CycleMix"
    Params: ClassVar[type[Section]] = CycleMixParams
    #: The gradient at the image is one more walk back through the network, about a forward pass.
    passes: ClassVar[Passes] = Passes(trained=2, inferred=1)

    def __init__(self, task: Task, params: CycleMixParams) -> None:
        super().__init__(task, params)
        self.mixer = SaliencyMix(area=params.area)

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        params: CycleMixParams = self.params
        by_gradient = params.saliency == "gradient"
        x, y = batch.image.detach().requires_grad_(by_gradient), batch.label
        logits = planes(self.net(x))
        pce = partial_cross_entropy(logits, y)
        order = torch.randperm(len(x), generator=generator, device=x.device)
        saliency: Saliency | None = None
        if by_gradient:
            (gradient,) = torch.autograd.grad(pce, x, retain_graph=True)
            length = gradient.float().square().sum(1).sqrt()
            saliency = length, length[order]
        x = x.detach()
        mix = self.mixer.draw(x, x[order], generator, saliency)
        hidden = squares(x, params.occlusion, generator)

        p = logits.softmax(1)
        mixed = planes(self.net(mix.images(x, x[order]).masked_fill(hidden, 0)))
        label = mix.labels(y, y[order]).masked_fill(hidden.squeeze(1), IGNORE)
        # What is hidden has a target of zeros, which the cosine leaves out.
        target = mix.predictions(p.detach(), p.detach()[order]).masked_fill(hidden, 0)
        invariance = 1 + negative_cosine(target, mixed.softmax(1))
        component = 1 + negative_cosine(without_islands(p), p)
        return {
            "pce": Term(pce),
            "mix_pce": Term(partial_cross_entropy(mixed, label)),
            "mix": Term(invariance, params.lambda_mix),
            "component": Term(component, params.lambda_component),
        }
