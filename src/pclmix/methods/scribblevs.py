"""ScribbleVS: pseudo labels of the student or its teacher, whichever agrees better with the scribbles."""

from __future__ import annotations

from copy import deepcopy
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Generator, Tensor

from pclmix.config import NonNegative, Section, Share
from pclmix.data.batch import Batch
from pclmix.losses import planes
from pclmix.losses.pseudo import confident_class
from pclmix.losses.supervised import dice_loss, partial_cross_entropy
from pclmix.losses.unlabelled import follow, ramp
from pclmix.methods.base import METHODS, Method, Passes, Task, Term, Terms


class ScribbleVSParams(Section):
    weight: NonNegative = Field(1.0, description="weight of the pseudo labels at the end of the ramp")
    ramp: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="share of training over which it rises")
    threshold: Share = Field(0.5, description="a pixel is a pseudo label where its probability exceeds this")
    decay: Annotated[float, Field(ge=0, lt=1)] = Field(0.99, description="of the teacher's weights")


@METHODS.register("scribblevs")
class ScribbleVS(Method):
    summary: ClassVar[str] = "pseudo labels of student or teacher, whichever has the lower loss on the scribbles"
    source: ClassVar[str] = "Wang et al. 2024, ScribbleVS: Dynamic Competitive Pseudo Label Selection"
    Params: ClassVar[type[Section]] = ScribbleVSParams
    passes: ClassVar[Passes] = Passes(trained=1, inferred=1)

    updates: Tensor

    def __init__(self, task: Task, params: ScribbleVSParams) -> None:
        super().__init__(task, params)
        # The teacher stays in training mode, as in the public code: its dropout makes a second view.
        self.teacher = deepcopy(self.net).requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        params: ScribbleVSParams = self.params
        with torch.no_grad():
            taught = planes(self.teacher(batch.image))
        logits = planes(self.net(batch.image))
        p, pce = logits.softmax(1), partial_cross_entropy(logits, batch.label)
        # Before its first update the teacher has random weights, even where the student's are pretrained.
        better = (partial_cross_entropy(taught, batch.label) < pce.detach()) & (self.updates > 0)
        pseudo = confident_class(torch.where(better, taught.softmax(1), p), params.threshold)
        loss = (partial_cross_entropy(logits, pseudo) + dice_loss(p, pseudo)) / 2
        return {
            "pce": Term(pce),
            "pseudo": Term(loss, params.weight * ramp(progress, params.ramp)),
        }

    def update(self, progress: Tensor) -> None:
        follow(list(self.teacher.parameters()), list(self.net.parameters()), self.updates, self.params.decay)
