"""Uncertainty-aware mean teacher: consistency with the teacher's mean over noisy views where it is certain."""

from __future__ import annotations

from copy import deepcopy
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Generator, Tensor

from pclmix.config import NonNegative, Positive, Section
from pclmix.data.batch import Batch
from pclmix.losses import planes
from pclmix.losses.supervised import partial_cross_entropy
from pclmix.losses.unlabelled import confident_mse, entropy, entropy_threshold, follow, ramp
from pclmix.methods.base import METHODS, Method, Passes, Task, Term, Terms


class USTMParams(Section):
    weight: NonNegative = Field(1.0, description="weight of the consistency at the end of its ramp")
    decay: Annotated[float, Field(ge=0, lt=1)] = Field(0.99, description="of the teacher's weights")
    views: Positive = Field(8, description="noisy views of each image that the teacher sees")
    noise: NonNegative = Field(0.1, description="standard deviation of the noise, clipped at twice that")


@METHODS.register("ustm")
class USTM(Method):
    summary: ClassVar[str] = "consistency with a mean teacher where its noisy views agree"
    source: ClassVar[str] = (
        "Liu et al. 2022, Weakly supervised segmentation of COVID19 infection with scribble annotation"
    )
    Params: ClassVar[type[Section]] = USTMParams
    passes: ClassVar[Passes] = Passes(trained=1, inferred=8)

    updates: Tensor

    def __init__(self, task: Task, params: USTMParams) -> None:
        super().__init__(task, params)
        # The teacher stays in training mode: its dropout is part of the noise, and BatchNorm uses the noisy views.
        self.teacher = deepcopy(self.net).requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        params: USTMParams = self.params
        logits = planes(self.net(batch.image))
        target = self._teach(batch.image, generator)
        p = logits.softmax(1)
        consistency = confident_mse(p, target, entropy(target), entropy_threshold(progress))
        # Before its first update the teacher has random weights, even where the student's are pretrained.
        weight = params.weight * ramp(progress) * (self.updates > 0)
        return {
            "pce": Term(partial_cross_entropy(logits, batch.label)),
            "consistency": Term(consistency, weight),
        }

    @torch.no_grad()
    def _teach(self, image: Tensor, generator: Generator) -> Tensor:
        """The teacher's mean probabilities (B, K, H, W) over all views, computed in one batch."""
        params: USTMParams = self.params
        turns = draw_turns(image, generator)
        views = turn(image, turns).repeat(params.views, 1, 1, 1)
        noise = torch.randn(views.shape, generator=generator, device=image.device, dtype=image.dtype) * params.noise
        p = planes(self.teacher(views + noise.clamp(-2 * params.noise, 2 * params.noise))).softmax(1)
        return turn(p.view(params.views, *image.shape[:1], *p.shape[1:]).mean(0), -turns)

    def update(self, progress: Tensor) -> None:
        follow(list(self.teacher.parameters()), list(self.net.parameters()), self.updates, self.params.decay)


def draw_turns(image: Tensor, generator: Generator) -> Tensor:
    """Quarter turns 0 to 3 for each of (B, C, H, W), uniformly; only half turns where height and width differ."""
    drawn = torch.randint(0, 4, (len(image),), generator=generator, device=image.device)
    return drawn if image.shape[-2] == image.shape[-1] else drawn // 2 * 2


def turn(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate each of (B, C, H, W) by its own number of quarter turns; negative numbers rotate back.

    Computes all rotations and selects one, since the host does not know the numbers.
    """
    turns = (turns % 4).view(-1, 1, 1, 1)
    turned = torch.where(turns == 2, torch.rot90(x, 2, (2, 3)), x)
    if x.shape[-2] == x.shape[-1]:
        turned = torch.where(turns == 1, torch.rot90(x, 1, (2, 3)), turned)
        turned = torch.where(turns == 3, torch.rot90(x, 3, (2, 3)), turned)
    return turned
