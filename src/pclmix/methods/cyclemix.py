"""CycleMix: salient blocks of one image pasted into another, occlusion, and consistency globally and locally."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Generator, Tensor

from pclmix.config import NonNegative, Positive, Section, Share
from pclmix.data.batch import Batch
from pclmix.labels import IGNORE
from pclmix.losses import full, planes
from pclmix.losses.pseudo import largest_components
from pclmix.losses.supervised import partial_cross_entropy
from pclmix.methods.base import METHODS, Method, Passes, Task, Term, Terms
from pclmix.methods.ustm import draw_turns, turn
from pclmix.mixing import SaliencyMix, squares


class CycleMixParams(Section):
    area: Annotated[float, Field(gt=0, lt=1)] = Field(0.5, description="share of the image that is pasted")
    occlusion: Positive = Field(32, description="side in pixels of the square emptied in a mixed image")
    # The public code has 0.1 beside a cross-entropy that is averaged over all pixels. Ours is averaged over the
    # scribbled ones, which are 1.4 % on ACDC: the same ratio is 0.1 / 0.014.
    lambda_mix: NonNegative = Field(7.0, description="weight of mix invariance")
    lambda_component: NonNegative = Field(7.0, description="weight of agreement with the largest components")
    # The public network ends in BatchNorm, so its first predictions are a mixture of classes. Another network may
    # begin with one class everywhere, which would remain its own largest component.
    ramp: Share = Field(0.2, description="share of training over which both consistencies rise from 0")


@METHODS.register("cyclemix")
class CycleMix(Method):
    summary: ClassVar[str] = "saliency-guided mix, occlusion, mix invariance, largest components"
    source: ClassVar[str] = "Zhang and Zhuang 2022, CycleMix"
    Params: ClassVar[type[Section]] = CycleMixParams
    #: The gradient at the image is one more backward pass, about as long as a forward pass.
    passes: ClassVar[Passes] = Passes(trained=2, inferred=1)

    def __init__(self, task: Task, params: CycleMixParams) -> None:
        super().__init__(task, params)
        self.mixer = SaliencyMix(area=params.area)

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        params: CycleMixParams = self.params
        x, y = batch.image.detach().requires_grad_(), batch.label
        logits = planes(self.net(x))
        pce = partial_cross_entropy(logits, y)
        # Saliency: the gradient of the loss at the image.
        (gradient,) = torch.autograd.grad(pce, x, retain_graph=True)
        saliency = gradient.float().square().sum(1).sqrt()
        x = x.detach()
        order = torch.randperm(len(x), generator=generator, device=x.device)
        mix = self.mixer.draw(x, x[order], generator, (saliency, saliency[order]))
        hidden = squares(x, params.occlusion, generator)
        turns = draw_turns(x, generator)

        p = logits.softmax(1)
        image = turn(mix.images(x, x[order]).masked_fill(hidden, 0), turns)
        label = turn(mix.labels(y, y[order]).unsqueeze(1).masked_fill(hidden, IGNORE), turns).squeeze(1)
        # Occluded pixels have targets of zeros, which `disagreement` leaves out.
        target = turn(mix.predictions(p, p[order]).masked_fill(hidden, 0), turns)
        mixed = planes(self.net(image))
        rise = (progress / params.ramp).clamp(max=1.0) if params.ramp > 0 else torch.ones_like(progress)
        return {
            "pce": Term(pce),
            "mix_pce": Term(partial_cross_entropy(mixed, label)),
            "mix": Term(disagreement(target, mixed.softmax(1)), params.lambda_mix * rise),
            "component": Term(disagreement(largest_component_labels(p), p), params.lambda_component * rise),
        }


def disagreement(target: Tensor, p: Tensor) -> Tensor:
    """The mean over pixels of 1 - cos(target, p) over classes; pixels whose target is zero are left out.

    target, p: (B, K, H, W), >= 0; the gradient reaches both. Returns a scalar; 0 where every target is zero.
    """
    target, p = full(target), full(p)
    norms = target.square().sum(1) * p.square().sum(1)
    tiny = torch.finfo(p.dtype).eps ** 2  # clamped before the root, whose slope at 0 is infinite
    known = target.detach().sum(1) > 0
    distance = 1 - (target * p).sum(1) * norms.clamp(min=tiny).rsqrt()
    return distance.masked_fill(~known, 0).sum() / known.sum().clamp(min=1)


def largest_component_labels(p: Tensor) -> Tensor:
    """The likeliest class of each pixel, one-hot, where it lies in the class's largest component; else background.

    p: (B, K, H, W), not differentiated.
    """
    label = largest_components(p.detach().argmax(1), p.shape[1])
    return (label[:, None] == torch.arange(p.shape[1], device=p.device).view(1, -1, 1, 1)).to(p.dtype)
